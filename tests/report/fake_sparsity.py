"""Writes the lines of kind `characteristics` as rank 0 records them, with numbers that hang together."""

import random

from fake_run import candidate


def observation(
    step: int, table: str = "source.weight", *, ranks: int = 4, density: float = 0.05, seed: int = 1, **more: object
) -> dict:
    """One line; `more` replaces what stands in it."""
    chance = random.Random(f"{seed} {step} {table}")
    rows, width = 8000, 256
    held = [round(rows * density * chance.uniform(0.95, 1.05)) for _ in range(ranks)]
    overlap = [[1.0 if a == b else 0.0 for b in range(ranks)] for a in range(ranks)]
    for a in range(ranks):
        for b in range(a):
            overlap[a][b] = overlap[b][a] = round(chance.uniform(0.22, 0.34), 3)
    curve = [round((k + 1) ** 0.8, 3) for k in range(ranks)]
    parts = [0.5**k for k in range(ranks)]
    parts = [part / sum(parts) for part in parts]
    sent = round(held[0] * (width * 4 + 4) * 1.5)
    line = {
        "kind": "characteristics",
        "step": step,
        "table": table,
        "num_rows": rows,
        "width": width,
        "value_bytes": 4,
        "rows_per_rank": held,
        "density": sum(held) / ranks / rows,
        "overlap_ratio": 0.27 if ranks > 1 else 0.0,
        "densification_curve": curve,
        "densification_ratio": curve[-1],
        "skewness_ratio": max(parts) * ranks,
        "parts": parts,
        "scheme": "allgather",
        "candidates": [
            candidate("densify", 12_288_000, 6, 0.0121),
            candidate("allgather", sent, 6, 0.0025),
            candidate("balanced", sent, 6, 0.0031),
        ],
        "measured_s": 0.0027,
        "measured_bytes": sent,
        "network": {"latency_s": 3e-4, "bandwidth_bytes_per_s": 1.2e9},
    }
    if ranks <= 64:
        line["overlap"] = overlap
    return line | more
