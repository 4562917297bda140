"""Every interleaving of one writer, two readers and three sequences, with crashes and timeouts.

The model runs the arena's protocol, as `lora_refit.arena` states it (W1-W6, R1-R6), on a memory
weaker than x86's: stores wait in a buffer of their participant and reach memory in any order, but
a release store comes after the earlier ones and a fence waits for an empty buffer. So a missing
fence or release shows here, which a test on one machine would hardly ever see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import pytest

FIRST_SEQUENCE, LAST_SEQUENCE = 2, 4
READERS = 2

# Addresses: a sequence word and one data word per half, a pin word per reader.
SEQUENCE, DATA, PIN = 0, 2, 4
Memory = tuple[int, ...]
SEQUENCE_1_PUBLISHED: Memory = (0, 1, 0, 1, 0, 0)


@dataclass(frozen=True)
class Rules:
    """The protocol's rules; a mutant breaks one."""

    hides_before_waiting: bool = True
    writer_fences: bool = True
    waits_for_pins: bool = True
    clears_dead_pins: bool = True
    clears_only_what_it_saw: bool = True
    packs_before_publishing: bool = True
    publishes_with_release: bool = True
    restores_after_timeout: bool = True
    reader_fences: bool = True
    rechecks_after_pinning: bool = True
    reads_before_unpinning: bool = True
    notices_dead_writer: bool = True

    @cached_property
    def writer_order(self) -> dict[str, str]:
        """What follows each step of the writer."""
        steps = ["hide", "scan", "pack", "publish"]
        if not self.packs_before_publishing:
            steps = ["hide", "scan", "publish", "pack"]
        if not self.hides_before_waiting:
            steps = ["scan", "hide", "pack", "publish"]
        return dict(zip(["start", *steps], [*steps, "start"], strict=True))


class Store(NamedTuple):
    address: int
    value: int
    release: bool = True


class Writer(NamedTuple):
    """`step` comes next; `reader` and `seen` say how far the scan of the pin words is."""

    step: str = "start"
    sequence: int = FIRST_SEQUENCE - 1
    reader: int = 0
    seen: int = 0
    buffer: tuple[Store, ...] = ()


class Reader(NamedTuple):
    """`step` comes next; `pending` says that the pin's store waits in the buffer."""

    step: str
    target: int = 0
    pending: bool = False


class State(NamedTuple):
    memory: Memory
    writer: Writer
    readers: tuple[Reader, ...]
    crashes_left: int
    timeouts_left: int

    def with_reader(self, index: int, reader: Reader, memory: Memory) -> State:
        readers = (*self.readers[:index], reader, *self.readers[index + 1 :])
        return State(memory, self.writer, readers, self.crashes_left, self.timeouts_left)

    def with_writer(self, writer: Writer, memory: Memory) -> State:
        return State(memory, writer, self.readers, self.crashes_left, self.timeouts_left)


def write(memory: Memory, address: int, value: int) -> Memory:
    return (*memory[:address], value, *memory[address + 1 :])


def writer_steps(state: State, rules: Rules) -> Iterator[State]:
    memory, writer = state.memory, state.writer
    step, sequence, reader, seen, buffer = writer
    half = sequence % 2
    after = rules.writer_order

    def store(address: int, value: int, release: bool = True) -> State:
        stores = (*buffer, Store(address, value, release))
        return state.with_writer(Writer(after[step], sequence, 0, 0, stores), memory)

    def scan(reader: int, seen: int = 0, step: str = "scan", memory: Memory = memory) -> State:
        return state.with_writer(Writer(step, sequence, reader, seen, buffer), memory)

    if step == "start":
        following = "done" if sequence == LAST_SEQUENCE else after["start"]
        yield state.with_writer(Writer(following, sequence + 1, buffer=buffer), memory)
    elif step == "hide":
        yield store(SEQUENCE + half, 0)
    elif step == "scan" and rules.writer_fences and buffer:
        return
    elif step == "scan" and (reader == READERS or not rules.waits_for_pins):
        yield scan(0, step=after["scan"])
    elif step == "scan":
        pinned = memory[PIN + reader]
        on_this_half = pinned and pinned % 2 == half
        yield scan(reader, pinned, "examine") if on_this_half else scan(reader + 1)
    elif step == "examine":
        if state.readers[reader].step == "dead" and rules.clears_dead_pins:
            yield scan(reader, seen, "clear")
        elif memory[PIN + reader] != seen:
            yield scan(reader)
    elif step == "clear":
        unchanged = memory[PIN + reader] == seen
        clears = unchanged or not rules.clears_only_what_it_saw
        yield scan(reader, memory=write(memory, PIN + reader, 0) if clears else memory)
    elif step == "pack":
        yield store(DATA + half, sequence, release=False)
    elif step == "publish":
        yield store(SEQUENCE + half, sequence, release=rules.publishes_with_release)


def writer_drains(state: State) -> Iterator[State]:
    """Each way one buffered store of the writer can reach memory next."""
    buffer = state.writer.buffer
    for index, store in enumerate(buffer):
        earlier = buffer[:index]
        if earlier and (store.release or any(e.address == store.address for e in earlier)):
            continue
        writer = state.writer._replace(buffer=earlier + buffer[index + 1 :])
        yield state.with_writer(writer, write(state.memory, store.address, store.value))


def reader_steps(state: State, index: int, rules: Rules) -> Iterator[State]:
    memory = state.memory
    step, target, pending = state.readers[index]
    half, pin = target % 2, PIN + index

    def then(step: str, memory: Memory = memory, pending: bool = pending) -> State:
        return state.with_reader(index, Reader(step, target, pending), memory)

    if pending:
        yield then(step, write(memory, pin, target), pending=False)
    if step == "attach":
        yield then("choose", write(memory, pin, 0))
    elif step == "choose":
        for later in range(target + 1, LAST_SEQUENCE + 1):
            yield state.with_reader(index, Reader("look", later), memory)
        yield state.with_reader(index, Reader("done"), memory)
    elif step == "look":
        if memory[SEQUENCE + half] == target:
            yield then("announce")
        elif max(memory[SEQUENCE : SEQUENCE + 2]) > target:
            yield then("choose")
        elif state.writer.step == "dead" and rules.notices_dead_writer:
            yield state.with_reader(index, Reader("done"), memory)
    elif step == "announce":
        yield then("recheck" if rules.rechecks_after_pinning else "read", pending=True)
    elif step == "recheck" and not (pending and rules.reader_fences):
        if memory[SEQUENCE + half] == target:
            yield then("read")
        elif not pending:
            yield then("look", write(memory, pin, 0))
    elif step == "read" and not pending:
        following = "choose" if rules.reads_before_unpinning else "late read"
        yield then(following, write(memory, pin, 0))
    elif step == "late read":
        yield then("choose")


def progress(state: State, rules: Rules) -> Iterator[State]:
    """What participants that neither crash nor give up can do."""
    yield from writer_steps(state, rules)
    yield from writer_drains(state)
    for index in range(READERS):
        yield from reader_steps(state, index, rules)


def faults(state: State, rules: Rules) -> Iterator[State]:
    """Crashes, restarts under the same reader index, and a writer that waits no longer."""
    writer = state.writer
    if writer.step == "examine" and state.timeouts_left:
        yield timed_out(state, rules)._replace(timeouts_left=state.timeouts_left - 1)
    if state.crashes_left and writer.step not in ("done", "dead"):
        memory = state.memory
        for store in writer.buffer:
            memory = write(memory, store.address, store.value)
        dead = state.with_writer(Writer("dead"), memory)
        yield dead._replace(crashes_left=state.crashes_left - 1)
    for index, reader in enumerate(state.readers):
        if reader.step == "dead":
            yield state.with_reader(index, Reader("attach"), state.memory)
        elif state.crashes_left and reader.step != "done":
            stored = write(state.memory, PIN + index, reader.target)
            memory = stored if reader.pending else state.memory
            dead = state.with_reader(index, Reader("dead"), memory)
            yield dead._replace(crashes_left=state.crashes_left - 1)


def timed_out(state: State, rules: Rules) -> State:
    """The half shows its old sequence again, and the same sequence is begun anew."""
    sequence, buffer = state.writer.sequence, state.writer.buffer
    if rules.restores_after_timeout:
        buffer = (*buffer, Store(SEQUENCE + sequence % 2, sequence - 2))
    begun = Writer(rules.writer_order["start"], sequence, buffer=buffer)
    return state.with_writer(begun, state.memory)


def wrong(state: State) -> str | None:
    memory = state.memory
    for step, target, _ in state.readers:
        if step in ("read", "late read") and memory[DATA + target % 2] != target:
            return "torn read"
    for half in range(2):
        if memory[SEQUENCE + half] not in (0, memory[DATA + half]):
            return "published before it is whole"
    idle = state.writer.step in ("start", "hide", "done") and not state.writer.buffer
    if idle and memory[SEQUENCE : SEQUENCE + 2] != memory[DATA : DATA + 2]:
        return "whole but not published"
    return None


def is_final(state: State) -> bool:
    return all(who.step in ("done", "dead") for who in (state.writer, *state.readers))


def explore(rules: Rules, crashes: int) -> tuple[str | None, int]:
    """Breadth first; returns what goes wrong first, or None, and how many states were seen."""
    readers = (Reader("choose"),) * READERS
    start = State(SEQUENCE_1_PUBLISHED, Writer(), readers, crashes, timeouts_left=1)
    seen = {start}
    waiting = deque(seen)
    while waiting:
        state = waiting.popleft()
        if fault := wrong(state):
            return fault, len(seen)
        onward = list(progress(state, rules))
        if not onward and not is_final(state):
            return "deadlock", len(seen)
        for following in (*onward, *faults(state, rules)):
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return None, len(seen)


def test_the_protocol_holds_in_every_interleaving() -> None:
    fault, states = explore(Rules(), crashes=2)
    print(f"{states} states")
    assert fault is None
    assert states > 10_000


MUTANTS = {
    "hides_before_waiting": "published before it is whole",
    "writer_fences": "published before it is whole",
    "waits_for_pins": "torn read",
    "clears_dead_pins": "deadlock",
    "clears_only_what_it_saw": "torn read",
    "packs_before_publishing": "published before it is whole",
    "publishes_with_release": "published before it is whole",
    "restores_after_timeout": "whole but not published",
    "reader_fences": "torn read",
    "rechecks_after_pinning": "torn read",
    "reads_before_unpinning": "torn read",
    "notices_dead_writer": "deadlock",
}


@pytest.mark.parametrize(("rule", "fault"), MUTANTS.items())
def test_each_rule_is_needed(rule: str, fault: str) -> None:
    found, states = explore(replace(Rules(), **{rule: False}), crashes=1)
    print(f"without {rule}: {found} within {states} states")
    assert found == fault
