"""The job of *Densifying Assumed-sparse Tensors*: Transformer-big on Stampede2, as Horovod and as tulle train it.

Its table is both looked up and projected onto. *Gather* is Horovod as it was, *reduce* with the paper's change; both
are simulated as they were, beside a plan of tulle, on one cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from rivals import Exchange, Replicas, lasting_s

from tulle.cost import Cost, Network, all_reduce_cost, exchange_cost, work_cost
from tulle.plan.lower import lower
from tulle.plan.plan import Plan
from tulle.plan.search import best_plan
from tulle.simulate import Noise, Step, run
from tulle.workload import Cluster, Machine, ModuleProfile, OptimizerProfile, Profile, TableProfile

VOCABULARY, WIDTH, INNER, LAYERS, VALUE_BYTES = 33_708, 1024, 4096, 6, 4
TABLE_BYTES = VOCABULARY * WIDTH * VALUE_BYTES
FUSED_BYTES = 128 * 2**20
WEAK_TOKENS = 5000
STRONG_TOKENS, SINGLE_HOST_TOKENS = 819_200, 25_600
CORES, HOST_MEMORY_BYTES = 48, 192 * 10**9
WEAK = (4, 8, 16, 32, 64, 128, 256, 400, 800, 1200)
STRONG = (32, 64, 128, 200, 256, 400)

NODE_MEMORY_BYTES_PER_S = 200e9
LATENCY_S = 2e-6
STEPS = 5
"""Of which a simulation with noise takes the median."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """The constants that were fitted; `CONSTANTS` says on what.

    Args:
        gathered_bytes_per_s: That one process receives of a gather, while the others of its host do so.
        all_reduced_bytes_per_s: That one process sends in an all-reduce.
        core_flop_per_s: Of one core in large products.
        slowdown: Factor by which computation takes longer while the link is busy.
        noise: Of a step of 5,000 tokens, standard deviation by mean.
    """

    gathered_bytes_per_s: float = 2.611e9
    all_reduced_bytes_per_s: float = 1.609e9
    core_flop_per_s: float = 6.2e10
    slowdown: float = 2.0
    noise: float = 0.005


FITTED = Fitted()


@dataclass(frozen=True, slots=True)
class Setting:
    """So many processes, each with so many source and as many target tokens.

    Args:
        processes: Ranks.
        per_host: Of each host, which share its cores.
        tokens: Of one process.
        fitted: What was fitted.
    """

    processes: int
    per_host: int
    tokens: int
    fitted: Fitted = FITTED

    @property
    def cluster(self) -> Cluster:
        """Stampede2's Skylake nodes as the two systems of the paper used them."""
        machine = Machine(
            flop_per_s=self.fitted.core_flop_per_s * CORES / self.per_host,
            memory_bytes_per_s=NODE_MEMORY_BYTES_PER_S / self.per_host,
            memory_bytes=HOST_MEMORY_BYTES // self.per_host,
        )
        across = Network(
            LATENCY_S,
            self.fitted.gathered_bytes_per_s,
            all_reduce_bytes_per_s=self.fitted.all_reduced_bytes_per_s,
            sum_bytes_per_s=machine.memory_bytes_per_s,
        )
        # The rates are those of one process while the others of its host do the same: each counts as a host.
        return Cluster(self.processes, 1, machine, across)

    @property
    def network(self) -> Network:
        """Of axis `data`."""
        return self.cluster.network(self.processes)

    @property
    def slices_bytes(self) -> int:
        """What one process gives to a gather: the projection's rows and a row for each token that was looked up."""
        return (VOCABULARY + 2 * self.tokens) * WIDTH * VALUE_BYTES

    @property
    def is_held(self) -> bool:
        """Whether gathered gradients, as sent and as received, fit into a host beside nothing else."""
        return self.per_host * self.processes * self.slices_bytes <= HOST_MEMORY_BYTES

    @property
    def profile(self) -> Profile:
        """The job on one process, in the order in which its pieces run."""
        machine = self.cluster.machine
        modules = [
            *[self._module(f"encoder.{i}", 4 * WIDTH**2 + 2 * WIDTH * INNER) for i in range(LAYERS)],
            *[self._module(f"decoder.{i}", 8 * WIDTH**2 + 2 * WIDTH * INNER) for i in range(LAYERS)],
            replace(self._module("projection", VOCABULARY * WIDTH), parameters_bytes=0),
        ]
        parameters_bytes = TABLE_BYTES + sum(module.parameters_bytes for module in modules)
        # Adam reads a parameter, its gradient and two moments, and writes three of them.
        optimizer = OptimizerProfile(2.0, 7 / machine.memory_bytes_per_s)
        computed_s = sum(module.forward_s + module.backward_s for module in modules)
        return Profile(
            model="Transformer-big",
            batch=self.tokens,
            modules=tuple(modules),
            tables=(
                TableProfile(
                    "shared.weight", VOCABULARY, WIDTH, VALUE_BYTES, False, (), "encoder.0", (), 2 * self.tokens
                ),
            ),
            optimizer=optimizer,
            cluster=replace(self.cluster, hosts=1),
            step_s=computed_s + optimizer.step_s_per_byte * parameters_bytes,
        )

    def _module(self, name: str, parameters: int) -> ModuleProfile:
        flop = 2.0 * parameters * self.tokens
        forward_s = flop / self.cluster.machine.flop_per_s
        return ModuleProfile(name, forward_s, 2 * forward_s, flop, parameters * VALUE_BYTES)

    def gathered(self) -> Cost:
        """Horovod's gather of the table's gradient, not coalesced, and the sum that TensorFlow makes of it."""
        others = self.processes - 1
        moved = exchange_cost(others * self.slices_bytes, others, self.network)
        return moved + work_cost(self.network, summed_bytes=self.processes * self.slices_bytes)

    def reduced(self) -> Cost:
        """All-reduce of the table's gradient as a dense tensor."""
        return all_reduce_cost(TABLE_BYTES, self.network, self.processes)

    def horovod(self, table: Cost) -> Step:
        """Horovod's step: the table's gradient is whole when backward is over."""
        profile = self.profile
        update_s = profile.step_s - sum(module.forward_s + module.backward_s for module in profile.modules)
        last = (Exchange("table", table),) if self.processes > 1 else ()
        return Replicas(profile.modules, self.network, self.processes, FUSED_BYTES, last=last, update_s=update_s).step()

    def seconds(self, step: Step) -> float:
        """Of a step: shorter batches vary more, as means of fewer sentences do."""
        noise = Noise(self.fitted.noise * (WEAK_TOKENS / self.tokens) ** 0.5)
        return lasting_s(run(step, steps=STEPS, noise=noise), self.fitted.slowdown)


def weak(processes: int, fitted: Fitted = FITTED) -> Setting:
    """5,000 tokens a process, four processes a host."""
    return Setting(processes, 4, WEAK_TOKENS, fitted)


def strong(processes: int, fitted: Fitted = FITTED) -> Setting:
    """819,200 tokens over all processes, two a host."""
    return Setting(processes, 2, STRONG_TOKENS // processes, fitted)


def weak_efficiency(setting: Setting, step: Step) -> float:
    """A step of one process without communication by this step, in per cent."""
    return 100.0 * setting.profile.step_s / setting.seconds(step)


def strong_efficiency(seconds: float, processes: int, base_s: float, base: int = STRONG[0]) -> float:
    """What the speed-up over the least number of processes is of the ideal one, in per cent."""
    return 100.0 * base_s / seconds * base / processes


def gather(setting: Setting) -> Step:
    """Horovod as it was."""
    return setting.horovod(setting.gathered())


def reduce(setting: Setting) -> Step:
    """Horovod with the paper's change."""
    return setting.horovod(setting.reduced())


def planned(setting: Setting) -> Step:
    """What tulle's planner chooses."""
    return lower(plan_of(setting), setting.profile, setting.cluster)


@lru_cache
def plan_of(setting: Setting) -> Plan:
    """The planner's choice; it is free to cut the model into stages."""
    return best_plan(setting.profile, setting.cluster, lookahead=True)


WAYS: dict[str, Callable[[Setting], Step]] = {"gather": gather, "reduce": reduce, "tulle": planned}
