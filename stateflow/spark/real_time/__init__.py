"""Operators in queries of Spark's real-time mode: rows are applied as they come, within an epoch of seconds or minutes.

Spark says at an epoch's end up to which offset of each source partition it came. When one is run again it may end
elsewhere, so that what was applied within it may come as rows of the next. So a row is known by its offset in its
source partition, and an output goes the way of its row:

* A task sends what has come as a batch of its own, whose number is the offset of its last row, and one: a sparse source
  for each source partition. Partitions of the state skip rows up to the number that they contain.
* Partitions keep the outputs of each batch. Where Spark gives rows that are contained, their outputs are given again: a
  batch's when its last row has come. So each is given in every epoch in which Spark gives that row, and in no other.
* The first row of a source partition in an epoch says up to where epochs have ended for good: outputs up to there are
  wanted no more, and go.
* An attempt of a task is the newest client of its sources. Those before it are refused from then on, whatever they
  still send.
* What comes of time and of no row, as timers, is of a source of each task's own: its numbers begin with the epoch, and
  what is kept of the same epoch is given when it is opened again.
"""
