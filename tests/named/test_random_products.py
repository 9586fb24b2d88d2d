"""Random einsums, sums and reshapes under random layouts: one process's numbers, or the same named error everywhere."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tulle
from ranks import run_on_ranks
from tulle import named as tn
from tulle.comm import traffic
from tulle.errors import TulleError

NAMES = "pqrstu"
SIZES = {name: size for name, size in zip(NAMES, (4, 2, 6, 4, 8, 3), strict=True)}
DIMS = {name: tn.Dim(name, size) for name, size in SIZES.items()}

words = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True).map("".join)
layouts = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["data", "model", "data+model"]), max_size=3)


@st.composite
def programs(draw):
    inputs = draw(st.lists(words, min_size=1, max_size=3))
    there = sorted(set("".join(inputs)))
    out = "".join(draw(st.permutations(draw(st.lists(st.sampled_from(there), unique=True, max_size=3)))))
    target = draw(st.sampled_from(there)) if not out else out[0]
    renamed = draw(st.sampled_from(["same", "same", "P", "T"]))
    return inputs, out, target, renamed


def compute(program, leaves):
    inputs, out, target, renamed = program
    named = [tn.from_torch(leaf, [DIMS[n] for n in word]) for leaf, word in zip(leaves, inputs, strict=True)]
    result = tn.einsum(*named, out=[DIMS[n] for n in out]) * 2
    if out and renamed != "same":
        result = result.rename(
            **{target: tn.Dim("u" if "u" not in out and SIZES[target] == 8 else renamed, SIZES[target])}
        )
    result = result + tn.sum(result)
    whole = tn.to_torch(result)
    (whole * torch.arange(whole.numel(), dtype=whole.dtype).view(whole.shape)).sum().backward()
    return [whole.detach(), *[leaf.grad for leaf in leaves]]


def leaves_of(program):
    draw = torch.Generator().manual_seed(3)
    shapes = [[SIZES[n] for n in word] for word in program[0]]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]


def attempt(examples):
    """For each example the error, or whether the numbers agree."""
    torch.set_num_threads(1)
    mesh = tulle.init(data=2, model=2)
    outcomes = []
    for program, layout in examples:
        expected = compute(program, leaves_of(program))
        before = traffic.total.messages
        try:
            with tn.use(mesh, layout):
                got = compute(program, leaves_of(program))
        except TulleError as error:
            outcomes.append((f"{type(error).__name__}: {error}", traffic.total.messages - before))
            continue
        close = [torch.allclose(a, b, rtol=1e-12, atol=1e-11) for a, b in zip(got, expected, strict=True)]
        outcomes.append(("equal" if all(close) else f"{program} under {layout} differs", 0))
    return outcomes


@settings(max_examples=3)
@given(st.lists(st.tuples(programs(), layouts), min_size=25, max_size=40))
def test_random_programs_agree_or_are_refused_alike(examples):
    first, *others = run_on_ranks(4, attempt, examples=examples)
    assert all(other == first for other in others), "all ranks say the same"
    for text, _ in first:
        assert text == "equal" or text.startswith("PlanError"), text
