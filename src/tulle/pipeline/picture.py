"""`picture`: a partition drawn as SVG: a row for each stage, a box for each piece as wide as it takes long."""

from __future__ import annotations

from html import escape

from tulle.pipeline.partition import Partition, Piece

WIDTH, ROW, LEFT, RIGHT, TOP = 960, 34, 70, 170, 34
_FILLS = ("#4c78a8", "#72b7b2", "#9ecae9")
"""Of neighbours, in turn."""


def picture(partition: Partition) -> str:
    """A partition as the text of an SVG file.

    Boxes are pieces in the order in which they run, with their names where there is room, and in full where the pointer
    rests on them; pinned ones have a thick frame. A line says where the slowest stage ends.

    Example:
        >>> from tulle.pipeline.partition import partition
        >>> drawn = picture(partition([Piece("a", 1.0), Piece("b", 2.0), Piece("c", 1.0)], 2))
        >>> drawn.startswith("<svg"), drawn.count("<title>")
        (True, 3)
    """
    slowest_s = max(partition.times_s) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / slowest_s
    height = TOP + ROW * partition.count + 8
    parts = [_text(LEFT, 18, "time of a micro-batch in each stage, forward and backward; framed: pinned")]
    for stage in range(partition.count):
        parts += _row(partition, stage, scale)
    end = WIDTH - RIGHT
    parts.append(f'<line x1="{end}" x2="{end}" y1="{TOP - 6}" y2="{height}" stroke="#d62728" stroke-dasharray="4 3"/>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12">\n{body}\n</svg>\n'
    )


def _row(partition: Partition, stage: int, scale: float) -> list[str]:
    top = TOP + ROW * stage
    parts, left = [_text(6, top + 19, f"stage {stage}")], float(LEFT)
    here = [piece for piece, at in zip(partition.pieces, partition.stages, strict=True) if at == stage]
    for number, piece in enumerate(here):
        width = piece.time_s * scale
        parts.append(_box(piece, (left, top, width), number, is_pinned=piece.name in partition.pinned))
        left += width
    share = f"{partition.times_s[stage] * 1e3:.1f} ms, {partition.memory_bytes[stage] / 1e6:.1f} MB"
    return [*parts, _text(WIDTH - RIGHT + 8, top + 19, share)]


def _box(piece: Piece, place: tuple[float, int, float], number: int, *, is_pinned: bool) -> str:
    left, top, width = place
    frame = 'stroke="#111" stroke-width="3"' if is_pinned else 'stroke="#fff" stroke-width="0.5"'
    title = f"{piece.name}: {piece.time_s * 1e3:.2f} ms, {piece.parameter_bytes / 1e6:.2f} MB of parameters"
    name = piece.name.rpartition(".")[2] if width < 7 * len(piece.name) else piece.name
    label = _text(left + 3, top + 19, name, fill="#fff") if width > 7 * len(name) + 6 else ""
    return (
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW - 6}" fill="{_FILLS[number % len(_FILLS)]}" '
        f"{frame}><title>{escape(title)}</title></rect>{label}"
    )


def _text(left: float, top: float, content: str, *, fill: str = "#111") -> str:
    return f'<text x="{left:.1f}" y="{top}" fill="{fill}">{escape(content)}</text>'
