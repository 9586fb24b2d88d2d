"""The floors that the design tells are those that `make check` holds us to."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
DESIGN = (ROOT / "docs/design.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
[CONTRACT] = PROJECT["tool"]["importlinter"]["contracts"]
LAYERS = [{room.strip() for room in layer.split("|")} for layer in CONTRACT["layers"]]


def landings(text: str) -> list[set[str]]:
    """The rooms of each landing in the table of floors, from the top."""
    floors = re.findall(r"^\| \d \| (.*?) \|", text, flags=re.MULTILINE)
    return [set(re.findall(r"`(\w+)`", landing)) for floor in floors for landing in floor.split(";")]


def ground_floor(text: str) -> list[str]:
    """The rooms in the table of the ground floor, by subject."""
    _, table = text.split("| ground floor |", maxsplit=1)
    subjects = re.findall(r"^\| (`.*?) \|", table.split("\n\n", maxsplit=1)[0], flags=re.MULTILINE)
    return [room for subject in subjects for room in re.findall(r"`(\w+)`", subject)]


def test_the_design_has_each_room_on_the_landing_that_the_contract_has_it_on():
    assert landings(DESIGN) == [layer for layer in LAYERS if layer != {"__main__"}]


def test_a_landing_or_a_room_that_is_missing_is_noticed():
    assert landings(DESIGN.replace("`plan`; `simulate`", "`plan`, `simulate`")) != landings(DESIGN)
    assert landings(DESIGN.replace(", `kept_memory`, `live`", ", `live`")) != landings(DESIGN)
    assert ground_floor(DESIGN.replace("`process_groups`, `board` |", "`process_groups` |")) != ground_floor(DESIGN)


def test_each_room_of_the_ground_floor_has_its_subject():
    [of_floor] = re.findall(r"^\| 0 \| (.*?) \|", DESIGN, flags=re.MULTILINE)
    assert sorted(ground_floor(DESIGN)) == sorted(re.findall(r"`(\w+)`", of_floor)), "each once"
