"""Every interleaving of one ring's writer and two readers around the decision to replace a bucket.

The steps are those of `lora_refit.arena` (B1-B5, T1-T5), on the memory of `test_arena_model`: stores
wait in a buffer of their participant, a release store comes after the earlier ones, a fence waits
for an empty buffer. Sessions are not in the model: they are pins on another word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

READERS = 2
BUCKETS = (2, 3)
LAST_SEQUENCE = 4

# Addresses: per half its sequence word, its bucket's name and its data; per reader its pin and ask.
SEQUENCE, NAME, DATA, PIN, ASK = 0, 2, 4, 6, 8
Memory = tuple[int, ...]
BUCKETS_1_AND_2_SHOWN: Memory = (2, 1, 1, 2, 2, 1, 0, 0, 0, 0)
AHEAD = 10
"""Added to a bucket that is asked for ahead and not waited for."""


@dataclass(frozen=True)
class Rules:
    """The protocol's rules; a mutant breaks one."""

    writer_fences: bool = True
    looks_for_pins: bool = True
    looks_for_asks: bool = True
    shows_again_what_is_used: bool = True
    clears_dead_pins: bool = True
    clears_only_what_it_saw: bool = True
    ignores_dead_asks: bool = True
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
    seen: int = 0
    buffer: tuple[Store, ...] = ()


class Reader(NamedTuple):
    """`step` comes next. `found` is the sequence that the reader pins, or wants to pin."""

    step: str = "idle"
    bucket: int = 0
    found: int = 0
    takes_left: int = 1
    buffer: tuple[Store, ...] = ()


class State(NamedTuple):
    memory: Memory
    writer: Writer
    readers: tuple[Reader, ...]
    crashes_left: int

    def with_reader(self, index: int, reader: Reader, memory: Memory) -> State:
        readers = (*self.readers[:index], reader, *self.readers[index + 1 :])
        return self._replace(memory=memory, readers=readers)

    def with_writer(self, writer: Writer, memory: Memory) -> State:
        return self._replace(memory=memory, writer=writer)

    def is_dead(self, reader: int) -> bool:
        return self.readers[reader].step == "dead"


def write(memory: Memory, address: int, value: int) -> Memory:
    return (*memory[:address], value, *memory[address + 1 :])


def after_store(state: State, store: Store, **changes: object) -> State:
    """The writer's store waits in its buffer, and its next step is in `changes`."""
    buffer = (*state.writer.buffer, store)
    return state.with_writer(state.writer._replace(buffer=buffer, **changes), state.memory)


def waited_for(state: State) -> set[int]:
    asks = state.memory[ASK : ASK + READERS]
    return {ask for reader, ask in enumerate(asks) if 0 < ask < AHEAD and not state.is_dead(reader)}


def asked_for(state: State) -> set[int]:
    asks = state.memory[ASK : ASK + READERS]
    return {ask % AHEAD for reader, ask in enumerate(asks) if ask and not state.is_dead(reader)}


def choices(state: State, rules: Rules) -> Iterator[tuple[int, int]]:
    """What `begin` may try: (bucket, half). A wait may be overdue whenever it is one."""
    memory, writer = state.memory, state.writer
    shown = writer_view(state)
    waited, asked = waited_for(state), asked_for(state)
    for bucket in asked - {name for _, name in shown}:
        for half, (_, name) in enumerate(shown):
            kept = waited if bucket in waited else asked
            pins = [
                pin
                for reader, pin in enumerate(memory[PIN : PIN + READERS])
                if pin and pin % 2 == half and not state.is_dead(reader)
            ]
            if writer.sequence < LAST_SEQUENCE and not (
                (rules.looks_for_asks and name in kept) or (rules.looks_for_pins and pins)
            ):
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

    def then(memory: Memory = memory, **changes: object) -> State:
        return state.with_writer(writer._replace(**changes), memory)

    if step == "choose":
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
        yield then(step="examine", seen=pin) if used else then(step="look at ask")
    elif step == "examine":
        dead = state.is_dead(reader) and rules.clears_dead_pins
        yield then(step="clear" if dead else "show again")
    elif step == "clear":
        unchanged = memory[PIN + reader] == writer.seen
        clears = unchanged or not rules.clears_only_what_it_saw
        cleared = write(memory, PIN + reader, 0) if clears else memory
        yield then(cleared, step="look at ask", seen=0)
    elif step == "look at ask":
        alive = not (rules.ignores_dead_asks and state.is_dead(reader))
        used = rules.looks_for_asks and memory[ASK + reader] == memory[NAME + half] and alive
        yield then(step="show again") if used else then(step="look at pin", reader=reader + 1)
    elif step == "show again":
        idle = {"step": "choose", "bucket": 0, "half": 0, "shown": 0, "reader": 0, "seen": 0}
        shown = writer.shown if rules.shows_again_what_is_used else 0
        yield after_store(state, Store(SEQUENCE + half, shown), **idle)
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
        for wanted in BUCKETS if takes_left else ():
            changes = {"bucket": wanted, "takes_left": takes_left - 1}
            yield then("look", (ask, wanted), **changes)
            yield then("ahead", (ask, AHEAD + wanted), **changes)
        yield then("done", (ask, 0))
    elif step == "ahead":
        yield then("look", (ask, bucket))
    elif step == "look" and not (buffer and rules.reader_fences_asks):
        for half in range(2):
            if memory[SEQUENCE + half]:
                yield then("look at name", found=memory[SEQUENCE + half])
        if state.writer.step == "dead" or state.writer.sequence == LAST_SEQUENCE:
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
        for following in BUCKETS if takes_left else ():
            yield then("read", (ask, AHEAD + following))
    elif step == "read":
        following = "idle" if rules.reads_before_unpinning else "late read"
        changes = {"bucket": 0, "found": 0} if following == "idle" else {}
        yield then(following, (pin, 0), **changes)
    elif step == "late read":
        yield then("idle", bucket=0, found=0)


def progress(state: State, rules: Rules) -> Iterator[State]:
    """What participants that do not crash can do."""
    yield from writer_steps(state, rules)
    yield from writer_drains(state)
    for index in range(READERS):
        yield from reader_steps(state, index, rules)


def crashes(state: State) -> Iterator[State]:
    """The second reader dies, and another takes its place."""
    index = READERS - 1
    reader, memory = state.readers[index], state.memory
    if reader.step == "dead":
        for address in (PIN + index, ASK + index):
            memory = write(memory, address, 0)
        yield state.with_reader(index, Reader(), memory)
    elif state.crashes_left and reader.step != "done":
        for store in reader.buffer:
            memory = write(memory, store.address, store.value)
        dead = state.with_reader(index, Reader("dead", takes_left=0), memory)
        yield dead._replace(crashes_left=state.crashes_left - 1)


def wrong(state: State) -> str | None:
    memory, writer = state.memory, state.writer
    for step, bucket, found, _, _ in state.readers:
        half = found % 2
        whole = memory[DATA + half] == found and memory[NAME + half] == bucket
        if step in ("unask", "read", "late read") and not whole:
            return "torn read"
        if step == "recheck" and writer.step == "pack" and writer.half == half:
            return "replaced under a reader that waits for it"
    return None


def is_final(state: State) -> bool:
    return all(reader.step in ("done", "dead") for reader in state.readers)


def explore(rules: Rules, crashes_left: int) -> tuple[str | None, int]:
    """Breadth first; returns what goes wrong first, or None, and how many states were seen."""
    readers = START
    start = State(BUCKETS_1_AND_2_SHOWN, Writer(), readers, crashes_left)
    seen = {start}
    waiting = deque(seen)
    while waiting:
        state = waiting.popleft()
        if fault := wrong(state):
            return fault, len(seen)
        onward = list(progress(state, rules))
        if not onward and not is_final(state):
            return "deadlock", len(seen)
        for following in (*onward, *crashes(state)):
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return None, len(seen)
