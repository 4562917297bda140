"""Arenas: how one trainer rank's packed shards reach engine workers on the same node.

An arena is one anonymous, sealed memfd: a control page and two data halves. Sequences count from 1,
and sequence `s` lives in half `s % 2`: the trainer packs one half while workers read the other.

Protocol
========

The half's *sequence word* decides everything: it holds the published sequence, or 0 when the half
holds nothing that may be read. Each reader owns a *pin word*: the sequence it reads, or 0.

===================================  ==============================================
writer: begin(s), pack, publish(s)   reader: pin(s), read, release()
===================================  ==============================================
W1  sequence word := 0               R1  sequence word == s?  otherwise wait
W2  full fence                       R2  pin word := s
W3  wait: no live pin on this half   R3  full fence
W4  pack the data                    R4  sequence word == s still?  otherwise unpin, go to R1
W5  write version and digests        R5  read version, digests and data
W6  sequence word := s (release)     R6  pin word := 0 (release)
===================================  ==============================================

* R2-R4 against W1-W3 is Dekker's pattern (a hazard pointer): each side stores its own word, then
  loads the other's. A processor may let a load overtake an earlier store to another address, and
  then both sides would see the old words and both go on. The full fences forbid that: at least one
  side sees the other, so either the writer waits for the pin or the reader withdraws it.
* R4 is needed because the writer may have passed W1-W3 between R1 and R2.
* W6 comes last and releases W4 and W5, R1 and R4 load with acquire: who sees `s` sees its bytes.
* R6 releases R5 and W3 loads with acquire, so no read is still under way when packing starts.
* W3 is bounded. When it fails nothing of the half was touched, so W1 is undone and the old content
  is whole and published as before.
* Sequences only grow, hence a word that returns to an old value can only mean that same content.

Liveness
========

A process id says little across pid namespaces and after reuse. So writer and readers each hold an
open-file-description lock on a byte of the memfd of their own; the kernel drops it when the process
ends, however it ends. A pin whose byte is free belongs to a dead reader and is cleared (W3); a
waiting reader that finds the writer's byte free says that the trainer is gone (R1).

Nothing is left behind: the memory has no name, and it goes with the last process that maps it.

Bucket rings
============

A bucket ring is an arena whose halves hold one bucket each of a *publication* that is too large to
be in memory as a whole. The writer makes a bucket when a reader asks for it, under the next sequence
that belongs to a half: W1-W6 and R1-R6 hold as above. A half's table names its publication and its
bucket; a reader looks at both under its pin.

Each reader has two more words. The *ask word* names the bucket that it waits for, or wants next.
The *session word* names the publication that it reads, also between two passes over the buckets.

===================================  ==============================================
writer: begin(b), merge, publish(b)  reader: take(b), read, release()
===================================  ==============================================
B1  choose a half that is not used   T1  ask word := b
B2  sequence word := 0               T2  full fence
B3  full fence                       T3  a half shows b? R2-R4, otherwise look again
B4  pinned, or its bucket asked for? T4  ask word := 0 (release)
    then show it again               T5  read, unpin as in R5, R6
B5  W4-W6
===================================  ==============================================

* Pins alone keep reads whole. Asks decide what is made and what stays.
* T1-T3 against B2-B4 is Dekker's pattern again: the writer sees the ask and keeps the bucket, or
  the reader sees it gone, and goes on asking. T4 follows the pin, so no moment lies between them.
* Sessions are pins on the *publication word*: to open one is R1-R4, and `wait_idle` is W1-W3.
* `offer` hides both halves and waits for their pins (W1-W3) before it shows a new publication.

Why every `take` ends, however many readers are at however many buckets:

1. A bucket that a reader waits for stays once it is made (B4), and the reader, which does nothing
   but look for it, pins it.
2. So a half is refused to a waited bucket by a pin, by a wait that turns into a pin, or by a bucket
   asked for ahead, which gives way after `PATIENCE_S`. Asks ahead never drive out one another.
3. A reader pins one bucket of a ring, and `take` refuses to wait for a second. Asking ahead under a
   pin is no wait: it is served in the other half, or later. So whoever pins a bucket releases it,
   unless it waits for another ring meanwhile.
4. Readers of several rings take a bucket from them in the order of the trainer ranks. Then the pins
   of the last ring are released whatever the others do, so those of the one before it are, and so on.

A dead reader's words do not count: its byte is free. A reader that is stopped, but alive, counts.
"""

from lora_refit.arena.layout import ArenaLayout
from lora_refit.arena.reader import ArenaReader, Pinned
from lora_refit.arena.ring_reader import RingReader, Taken
from lora_refit.arena.ring_writer import RingWriter
from lora_refit.arena.writer import ArenaWriter

__all__ = [
    "ArenaLayout",
    "ArenaReader",
    "ArenaWriter",
    "Pinned",
    "RingReader",
    "RingWriter",
    "Taken",
]
