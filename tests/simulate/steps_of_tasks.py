"""Steps whose time one can count by hand."""

from tulle.simulate import Step, Task


def one_f_one_b(stages, micro_batches, *, forward_s, backward_s, message_s=0.0, replicas=1):
    """1F1B as a list: whatever could begin first comes first, backward before forward."""
    tasks, places, ready = [], {}, {}
    for stage in range(stages):
        warm = min(stages - stage, micro_batches)
        order = [("F", i) for i in range(warm)]
        for i in range(micro_batches):
            order.append(("B", i))
            order += [("F", i + warm)] if i + warm < micro_batches else []
        ready[stage] = order
    while any(ready.values()):
        for stage in range(stages):
            while ready[stage] and _needs(ready[stage][0], stage, stages) <= places.keys():
                what = ready[stage].pop(0)
                after = tuple(sorted(places[need] for need in _needs(what, stage, stages)))
                seconds = forward_s if what[0] == "F" else backward_s
                tasks.append(Task(what[0], "device", seconds, after=after, stage=stage, micro_batch=what[1]))
                if stage != (stages - 1 if what[0] == "F" else 0):
                    tasks.append(Task("send", "link", message_s, after=(len(tasks) - 1,), stage=stage, kind="pipe"))
                places[*what, stage] = len(tasks) - 1
    return Step({"pipe": stages, "data": replicas}, tuple(tasks))


def _needs(what, stage, stages):
    kind, micro_batch = what
    if kind == "F":
        return {("F", micro_batch, stage - 1)} if stage else set()
    return {("B", micro_batch, stage + 1)} if stage < stages - 1 else {("F", micro_batch, stage)}
