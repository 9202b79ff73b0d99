"""Collectives between processes of one host over shared memory: a backend of the tensor layer for tensors in host memory.

Theory: every member owns one segment and writes only there; all others look at it through read-only windows (`pages`). A segment has a page
of counters, a ring of slots for collectives, and a small ring for each other member for what goes to that one alone. A counter only
grows; who finds those of others behind sleeps until one of them rings (`worker`). So there are no locks between processes, and a member
that is gone leaves nothing locked.

All members go through the same *blocks* of an operation in the same order (`schedule`), however large the tensors: a block is copied into
a slot of the ring, the others read it there, and the slot is used again when all have. In a reduction each member combines one part of
each block, always in the order of the members, and all others copy what it got. So the result has the same bits on all members, and in
every run.

Rules:

* Nobody can write to what is another's: what is left over of a former epoch, or a process gone wild, damages its own segment only.
* Before anything is written to a tensor all members have said which operation they are in, and all have said the same.
* The memory that a member needs is that of its segment, whatever the size of the tensors.
* An operation that starts and is small is tried at once, in the caller's thread: who comes last to it need not wait for a thread.
"""
