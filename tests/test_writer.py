"""Streamed programs as lists: nothing waits for what comes later, and each element of C is made
once, of all of K."""

import functools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices import needs
from support.small_sizes import small_panels, small_turns

from hybrid_gemm import Runner
from hybrid_gemm.arrays.operand import Operand, Operands
from hybrid_gemm.errors import OutOfMemoryError, UsageError
from hybrid_gemm.execution.commands import OUT, Call, Gate, Move, Multiply, Record, Split, Sum, Wait
from hybrid_gemm.execution.device_memory import SharedBlocks
from hybrid_gemm.execution.streamed import StreamedExecutor
from hybrid_gemm.execution.writer import Writer
from hybrid_gemm.problem import Problem


@pytest.fixture
def written(monkeypatch):
    small_panels(monkeypatch)
    small_turns(monkeypatch)

    def write(m, n, k, beta, order, resident, **options):
        """The program of a product of matrices of the host, and all of its commands."""
        runner = Runner(device="emulator", kernel="shared_tile", **options)
        a, b, out = np.zeros((m, k), "f4", order), np.zeros((k, n), "f4"), np.zeros((m, n), "f4")
        problem = runner.plans.settle(Problem(m, n, k, beta=beta))
        plan = runner.plan(problem, resident=resident)
        c = Operand.of(np.zeros((m, n), "f4", order)) if beta else None
        operands = Operands(problem, Operand.of(a), Operand.of(b), c, Operand.of(out))
        variant = runner.variant(plan)
        program = Writer(plan, runner.devices, variant, operands, resident=resident)
        commands = list(program.commands)
        while not program.whole:
            commands += program.write_more(7)
        return program, commands

    return write


def events_of(command):
    """The events that a command waits for, and those that it records."""
    match command:
        case Record():
            return (), (command.event,)
        case Wait():
            return (command.event,), ()
        case Move():
            return command.after, (command.start, command.stop)
        case Call():
            return (), (command.start, command.stop)
        case Split():
            return (), (command.event,)
        case Gate():
            return command.after, ()
    return (), ()


@needs("emulator")
def test_programs_are_in_order_and_make_c_once(written):
    drawn = st.fixed_dictionaries({
        "m": st.integers(1, 70), "n": st.integers(1, 70), "k": st.integers(0, 70),
        "beta": st.sampled_from([0, 0, 2]), "order": st.sampled_from("CF"),
        "resident": st.booleans(), "threads": st.integers(1, 5),
        "split": st.sampled_from(["rows", "cols", "auto"]),
        "emulate_devices": st.sampled_from([None, 2, 3]),
        "reduce": st.sampled_from(["ordered", "ordered", "critical"]),
        "max_device_memory": st.sampled_from([None, None, 9_000, 20_000]),
    })  # fmt: skip

    seen = set()

    @settings(max_examples=150)
    @given(drawn)
    def check(asked):
        try:
            program, commands = written(**asked)
        except (OutOfMemoryError, UsageError):  # such options do not go together
            return
        done, made = set(), np.zeros((asked["m"], asked["n"]), int)
        flops, lanes = 0, dict.fromkeys(program.lanes, 0)
        for command in commands:
            waits, records = events_of(command)
            assert done.issuperset(waits), command
            assert done.isdisjoint(records), command
            done.update(records)
            if not isinstance(command, Gate):
                lanes[command.worker, command.lane] += 1
            match command:
                case Multiply():
                    flops += command.flops
                case Move(up=False):
                    made[command.dst.rows.slice, command.dst.cols.slice] += 1
            if isinstance(command, Sum | Multiply):
                target = command.out if isinstance(command, Sum) else command.c
                if target.slot == OUT:
                    made[target.rows.slice, target.cols.slice] += 1
        assert len(done) == program.events
        assert flops == 2 * asked["m"] * asked["n"] * program.problem.k
        if program.on_device:
            assert (made == 1).all()
        else:
            adds = [x for x in commands if isinstance(x, Call) and x.args[0].slot == OUT]
            assert len(adds) == len(program.workers)
        assert {event for x in program.marks for event in (x.start, x.stop)} <= done
        seen.add((bool(program.plan.turns_in_memory), program.reduce, asked["resident"]))

    check()
    assert len(seen) > 2  # such as with and without turns, sums on the host, and gates


@needs("emulator")
def test_turns_that_share_with_other_plays_end(monkeypatch, rng):
    """As pieces of a rank with little memory: the second waited for what the first had brought."""
    small_panels(monkeypatch)
    small_turns(monkeypatch)
    runner = Runner(device="emulator", kernel="shared_tile", threads=1, max_device_memory=9_000)
    a, b = (rng.integers(-4, 5, (64, 64)).astype("f4") for _ in "ab")
    problem = runner.plans.settle(Problem(64, 64, 64))
    plan = runner.plan(problem)
    assert plan.turns_in_memory
    executor, shared = StreamedExecutor(runner.devices), SharedBlocks("B")
    runner.devices[0].start_clock()
    for _ in "12":
        out = np.zeros((64, 64), "f4")
        operands = Operands(problem, *map(Operand.of, (a, b)), None, Operand.of(out))
        play = functools.partial(executor.play, plan, runner.variant(plan), operands, shared=shared)
        thread = threading.Thread(target=play, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        np.testing.assert_array_equal(out, a @ b)
