"""The campaigns of faults, as docs/notes/campaigns.md tells them."""

from . import grid, result

KINDS = ("hangs", "wrong file", "temporary left")  # beside which there are wrong codes and words


def campaign() -> str:
    found = {where: result("faults", where) for where in ("cpu", "resumed", "slurm", "ipc", "nccl")}
    return "\n\n".join([_counts(found), *(_drawn(x) for x in found.values())])


def _counts(found: dict[str, dict]) -> str:
    rows = []
    for where, data in found.items():
        said, wrong = data["summary"], data["summary"]["wrong"]
        rows.append([
            f"[{where}](results/faults_{where}.json)", said["faults"],
            *(wrong.get(kind, 0) for kind in KINDS),
            sum(count for kind, count in wrong.items() if kind not in KINDS),
            said["finished_all_the_same"],
            f"{said['resumed']} ({said['resumed_with_panels']} with panels)",
            said["longest_s"], said["longest_s_stopped_rank"],
        ])  # fmt: skip
    columns = ["<where", "faults", "hangs", "wrong or half files", "temporaries left",
               "other errors", "went on to the right C", "resumed", "longest s",
               "longest s, stopped rank"]  # fmt: skip
    return grid(columns, rows)


def _drawn(data: dict) -> str:
    """How it was drawn, in one sentence."""
    restarts = data["summary"].get("restarts")
    failed = f" In {restarts} of them mpirun itself did not start at first." if restarts else ""
    once = f", {data['at_once']} at once" if data["at_once"] > 1 else ""
    return (
        f"`{data['command']}`: {data['ranks']} ranks, "
        f"{data['environment']['cpu']['cores']} cores{once}, `--rank-timeout "
        f"{data['rank_timeout_s']:g}`, a limit of {data['limit_s']:g} s.{failed}"
    )
