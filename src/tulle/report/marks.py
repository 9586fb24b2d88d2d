"""What pages draw without a chart: entries of legends, and bars made of segments."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a legend; `kind` says how the colour is drawn in the chart: line, wide, points or area."""

    colour: str
    label: str
    kind: str = "area"


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a bar: `percent` of the longest bar's length; `text` stands in it, as far as there is room."""

    colour: str
    label: str
    percent: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """A horizontal bar: what it stands for, its pieces, and its value in words."""

    name: str
    detail: str
    value: str
    segments: tuple[Segment, ...]
