"""Every interleaving of one ring's writer and two readers around the decision to replace a bucket.

The steps are those of `lora_refit.arena` (B1-B5, T1-T5), on the memory of `test_arena_model`: stores
wait in a buffer of their participant, a release store comes after the earlier ones, a fence waits
for an empty buffer. Sessions and deaths are not in this model: a session is a pin on another word,
and dead readers' words are cleared, or not counted, as in that one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

READERS = 2
WANTED = (2, 3)
LAST_SEQUENCE = 4

# Addresses: per half its sequence word, its bucket's name and its data; per reader its pin and ask.
SEQUENCE, NAME, DATA, PIN, ASK = 0, 2, 4, 6, 8
Memory = tuple[int, ...]
BUCKETS_1_AND_2_ARE_SHOWN: Memory = (2, 1, 1, 2, 2, 1, 0, 0, 0, 0)
AHEAD = 10
"""Added to a bucket that is asked for ahead and not waited for."""


@dataclass(frozen=True)
class Rules:
    """The protocol's rules; a mutant breaks one."""

    writer_fences: bool = True
    looks_for_pins: bool = True
    looks_for_asks: bool = True
    shows_again_what_is_used: bool = True
    publishes_with_release: bool = True
    reader_fences_pins: bool = True
    reader_fences_asks: bool = True
    rechecks_after_pinning: bool = True
    unasks_after_pinning: bool = True
    reads_before_unpinning: bool = True


class Store(NamedTuple):
    address: int
    value: int
    release: bool = True


class Writer(NamedTuple):
    """`step` comes next. The rest: what `begin` decided, and how far its second look is."""

    step: str = "choose"
    sequence: int = 2
    bucket: int = 0
    half: int = 0
    shown: int = 0
    reader: int = 0
    buffer: tuple[Store, ...] = ()


class Reader(NamedTuple):
    """`step` comes next. `found` is the sequence that the reader pins, or wants to pin."""

    step: str = "idle"
    bucket: int = 0
    found: int = 0
    takes_left: int = 0
    buffer: tuple[Store, ...] = ()


class State(NamedTuple):
    memory: Memory
    writer: Writer
    readers: tuple[Reader, ...]

    def with_reader(self, index: int, reader: Reader, memory: Memory) -> State:
        readers = (*self.readers[:index], reader, *self.readers[index + 1 :])
        return self._replace(memory=memory, readers=readers)

    def with_writer(self, writer: Writer, memory: Memory) -> State:
        return self._replace(memory=memory, writer=writer)


def write(memory: Memory, address: int, value: int) -> Memory:
    return (*memory[:address], value, *memory[address + 1 :])


def after_store(state: State, store: Store, **changes: object) -> State:
    """The writer's store waits in its buffer, and its next step is in `changes`."""
    buffer = (*state.writer.buffer, store)
    return state.with_writer(state.writer._replace(buffer=buffer, **changes), state.memory)


def choices(state: State, rules: Rules) -> Iterator[tuple[int, int]]:
    """What `begin` may try: (bucket, half). A wait may be overdue whenever it is one."""
    asks = state.memory[ASK : ASK + READERS]
    pinned = {pin % 2 for pin in state.memory[PIN : PIN + READERS] if pin}
    waited = {ask for ask in asks if 0 < ask < AHEAD}
    asked = {ask % AHEAD for ask in asks if ask}
    shown = writer_view(state)
    for bucket in asked - {name for _, name in shown}:
        kept = waited if bucket in waited else asked
        for half, (_, name) in enumerate(shown):
            if rules.looks_for_asks and name in kept:
                continue
            if rules.looks_for_pins and half in pinned:
                continue
            yield bucket, half


def writer_view(state: State) -> list[tuple[int, int]]:
    """(sequence, bucket) of each half as the writer remembers them: its own last stores."""
    memory = state.memory
    for store in state.writer.buffer:
        memory = write(memory, store.address, store.value)
    return [(memory[SEQUENCE + half], memory[NAME + half]) for half in range(2)]


def writer_steps(state: State, rules: Rules) -> Iterator[State]:
    memory, writer = state.memory, state.writer
    step, half, reader = writer.step, writer.half, writer.reader

    def then(**changes: object) -> State:
        return state.with_writer(writer._replace(**changes), memory)

    if step == "choose" and writer.sequence < LAST_SEQUENCE:
        for bucket, half in choices(state, rules):
            shown = writer_view(state)[half][0]
            yield then(step="hide", bucket=bucket, half=half, shown=shown)
    elif step == "hide":
        yield after_store(state, Store(SEQUENCE + half, 0), step="look at pin", reader=0)
    elif step == "look at pin" and rules.writer_fences and writer.buffer:
        return
    elif step == "look at pin" and reader == READERS:
        yield then(step="pack", reader=0, sequence=next_sequence(writer.sequence, half))
    elif step == "look at pin":
        pin = memory[PIN + reader]
        used = rules.looks_for_pins and pin and pin % 2 == half
        yield then(step="show again" if used else "look at ask")
    elif step == "look at ask":
        used = rules.looks_for_asks and memory[ASK + reader] == memory[NAME + half]
        if used:
            yield then(step="show again")
        else:
            yield then(step="look at pin", reader=reader + 1)
    elif step == "show again":
        shown = writer.shown if rules.shows_again_what_is_used else 0
        chosen = {"step": "choose", "bucket": 0, "half": 0, "shown": 0, "reader": 0}
        yield after_store(state, Store(SEQUENCE + half, shown), **chosen)
    elif step == "pack":
        yield after_store(state, Store(DATA + half, writer.sequence, False), step="name")
    elif step == "name":
        yield after_store(state, Store(NAME + half, writer.bucket, False), step="publish")
    elif step == "publish":
        store = Store(SEQUENCE + half, writer.sequence, rules.publishes_with_release)
        yield after_store(state, store, step="choose", bucket=0, half=0, shown=0)


def next_sequence(last: int, half: int) -> int:
    return last + 1 + (last + 1 - half) % 2


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
    memory, reader = state.memory, state.readers[index]
    step, bucket, found, takes_left, buffer = reader
    half, pin, ask = found % 2, PIN + index, ASK + index

    def then(step: str, *stores: tuple[int, int], **changes: object) -> State:
        waiting = buffer + tuple(Store(*store) for store in stores)
        changed = reader._replace(step=step, buffer=waiting, **changes)
        return state.with_reader(index, changed, memory)

    if buffer:
        first, *later = buffer
        drained = reader._replace(buffer=tuple(later))
        yield state.with_reader(index, drained, write(memory, first.address, first.value))
    if step == "idle":
        for wanted in WANTED if takes_left else ():
            changes = {"bucket": wanted, "takes_left": takes_left - 1}
            yield then("look", (ask, wanted), **changes)
            yield then("ahead", (ask, AHEAD + wanted), **changes)
        if not takes_left:
            yield then("done", (ask, 0))
    elif step == "ahead":
        yield then("look", (ask, bucket))
    elif step == "look" and not (buffer and rules.reader_fences_asks):
        for half in range(2):
            if memory[SEQUENCE + half]:
                yield then("look at name", found=memory[SEQUENCE + half])
        if state.writer.sequence == LAST_SEQUENCE:
            yield then("done", (ask, 0))
    elif step == "look at name":
        if memory[NAME + half] == bucket:
            stores = [(pin, found)] if rules.unasks_after_pinning else [(ask, 0), (pin, found)]
            yield then("recheck" if rules.rechecks_after_pinning else "unask", *stores)
        else:
            yield then("look", found=0)
    elif step == "recheck" and not (buffer and rules.reader_fences_pins):
        if memory[SEQUENCE + half] == found:
            yield then("unask")
        else:
            yield then("look", (pin, 0), (ask, bucket), found=0)
    elif step == "unask":
        yield then("read", (ask, 0))
        for following in WANTED if takes_left else ():
            yield then("read", (ask, AHEAD + following))
    elif step == "read":
        following = "idle" if rules.reads_before_unpinning else "late read"
        changes = {"bucket": 0, "found": 0} if following == "idle" else {}
        yield then(following, (pin, 0), **changes)
    elif step == "late read":
        yield then("idle", bucket=0, found=0)


def progress(state: State, rules: Rules) -> Iterator[State]:
    yield from writer_steps(state, rules)
    yield from writer_drains(state)
    for index in range(READERS):
        yield from reader_steps(state, index, rules)


TORN, IN_VAIN, HIDDEN = "torn read", "replaced under a reader that has found it", "whole but hidden"


def faults(state: State) -> Iterator[str]:
    memory, writer = state.memory, state.writer
    for step, bucket, found, _, _ in state.readers:
        half = found % 2
        whole = memory[DATA + half] == found and memory[NAME + half] == bucket
        if step in ("unask", "read", "late read") and not whole:
            yield TORN
        if step == "recheck" and writer.step == "pack" and writer.half == half:
            yield IN_VAIN
    idle = writer.step == "choose" and not writer.buffer
    if idle and memory[SEQUENCE : SEQUENCE + 2] != memory[DATA : DATA + 2]:
        yield HIDDEN


def explore(
    rules: Rules, takes: tuple[int, int], tolerated: str | None = None
) -> tuple[str | None, int]:
    """Breadth first; returns what goes wrong first, or None, and how many states were seen.

    takes: how many buckets each reader takes. tolerated: a fault that is none.
    """
    readers = tuple(Reader(takes_left=number) for number in takes)
    start = State(BUCKETS_1_AND_2_ARE_SHOWN, Writer(), readers)
    seen = {start}
    waiting = deque(seen)
    while waiting:
        state = waiting.popleft()
        for fault in faults(state):
            if fault != tolerated:
                return fault, len(seen)
        onward = list(progress(state, rules))
        if not onward and any(reader.step != "done" for reader in state.readers):
            return "deadlock", len(seen)
        for following in onward:
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return None, len(seen)


def test_the_protocol_holds_in_every_interleaving() -> None:
    fault, states = explore(Rules(), takes=(2, 1))
    print(f"{states} states")
    assert fault is None
    assert states > 10_000


MUTANTS = {
    "writer_fences": IN_VAIN,
    "looks_for_pins": TORN,
    "looks_for_asks": IN_VAIN,
    "shows_again_what_is_used": HIDDEN,
    "publishes_with_release": TORN,
    "reader_fences_pins": TORN,
    "reader_fences_asks": IN_VAIN,
    "rechecks_after_pinning": TORN,
    "unasks_after_pinning": IN_VAIN,
    "reads_before_unpinning": TORN,
}


@pytest.mark.parametrize(("rule", "fault"), MUTANTS.items())
def test_each_rule_is_needed(rule: str, fault: str) -> None:
    found, states = explore(replace(Rules(), **{rule: False}), takes=(1, 1))
    print(f"without {rule}: {found} within {states} states")
    assert found == fault


@pytest.mark.parametrize(("rule", "fault"), [("looks_for_asks", None), ("writer_fences", TORN)])
def test_pins_alone_keep_reads_whole(rule: str, fault: str | None) -> None:
    found, _ = explore(replace(Rules(), **{rule: False}), takes=(1, 1), tolerated=IN_VAIN)
    assert found == fault
