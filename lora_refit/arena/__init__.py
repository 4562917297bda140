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
"""

from lora_refit.arena.layout import ArenaLayout
from lora_refit.arena.reader import ArenaReader, Pinned
from lora_refit.arena.writer import ArenaWriter

__all__ = ["ArenaLayout", "ArenaReader", "ArenaWriter", "Pinned"]
