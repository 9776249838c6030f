"""Operators in queries of Spark's real-time mode, which apply rows as they come within an epoch of seconds or minutes.

At an epoch's end Spark records the offset that each source partition has reached. An epoch that runs again may end
elsewhere, so rows that were applied within it may come as rows of the next one. Therefore a row is identified by its
offset in its source partition, and its output follows the row:

* A task sends the rows that have come as a batch of its own, to a sparse source for each source partition. The batch's
  number is the offset of its last row plus one. Partitions of the state skip rows up to the number that they contain.
* Partitions keep the outputs of each batch. When Spark gives rows again that a partition contains, the task gives a
  batch's stored outputs once the batch's last row has come. So an output is given in every epoch in which Spark gives
  its row, and in no other.
* The first row of a source partition in an epoch shows how far earlier epochs have ended for good. Outputs up to there
  are no longer wanted, and are dropped.
* An attempt of a task is the newest client of its sources. From then on partitions refuse earlier attempts, whatever
  they still send.
* Outputs that come of time and of no row, such as those of timers, belong to a source of each task's own. The numbers
  of its batches begin with the epoch's, and the kept outputs of an epoch are given again when the epoch is opened
  again.
"""
