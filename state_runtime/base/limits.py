"""Bounds on everything that is read from outside, in one place."""

from __future__ import annotations

__all__: list[str] = []

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# A manifest lists segments and table files, never keys or shards' parts. Design: at most 256 KiB in the planned
# worst case (200 shards, 5 operators, 600 epochs); 8 MiB leaves room and still parses in milliseconds.
MANIFEST_BYTES_MAX = 8 * MIB
# job.json, terms, boundary, control requests: a few hundred bytes each.
SMALL_JSON_BYTES_MAX = 256 * KIB
JSON_DEPTH_MAX = 32
# A boundary lists the ids of kept snapshots, about 8 bytes each.
BOUNDARY_BYTES_MAX = 16 * MIB

# The packed segment of one epoch: at most (inline bytes a task) x (tasks). Direct objects are bounded by a task's
# input.
SEGMENT_BYTES_MAX = 16 * 1024 * MIB
SEGMENT_INDEX_BYTES_MAX = 64 * MIB
SEGMENT_PARTS_MAX = 1_000_000
# One Arrow part is decoded at once; its uncompressed size is stated in the index and checked before decoding.
PART_BYTES_MAX = 4 * 1024 * MIB
# A column of text or binary ends at 2 GiB in Arrow. So stored rows are put together so many bytes at a time, and more
# only where one key has more; two versions of the largest key that may be written still fit.
FOLD_BYTES_MAX = 256 * MIB
KEY_BYTES_MAX = GIB
# Tables of all states in a manifest, about: they take 260 bytes each, and half of a manifest may go to them.
TABLES_MAX = MANIFEST_BYTES_MAX // 2 // 260

MAX_PARALLELISM = 32768  # key groups: the top 15 bits of the key hash
KEY_GROUP_BITS = 15

PATH_CHARS_MAX = 1024
NAME_CHARS_MAX = 63

# Commit and term claims give up after this many lost races in a row: more means something is wrong, not slow.
CLAIM_ATTEMPTS_MAX = 16
# Read-back after a write with an unknown outcome.
READ_BACK_ATTEMPTS_MAX = 5

# The log of files that a source has seen: one stored object or part of it, as a reader takes it into memory.
# Writers stay far below, so that what is joined later still fits.
SOURCE_LOG_BYTES_MAX = 256 * MIB
SOURCE_LOG_PART_BYTES_MAX = 32 * MIB
# All of one source's log: about 28 million names of 150 bytes. It is streamed, so memory does not bound it; Spark
# itself reads and writes all of it each time that it compacts.
SOURCE_LOG_TOTAL_BYTES_MAX = 4 * GIB
# What other sources keep in Spark's checkpoint directory rides in each manifest. A rate source has 16 bytes, Kafka
# about 20 a partition.
SOURCE_FILES_MAX = 64
SOURCE_FILES_BYTES_MAX = MIB

# What the epochs of one checkpoint may leave in its manifest: about 300 bytes a file or segment. A checkpoint comes
# early beyond.
PENDING_FILES_MAX = 2_000
PENDING_SEGMENTS_MAX = 256
# What the driver keeps in mind of them: parts in memory are flushed beyond, objects that tasks uploaded end in a
# checkpoint.
PENDING_PARTS_MAX = 50_000
PENDING_OBJECTS_MAX = 50_000

# With the changelog off: the listing of all shards' files; about 250 bytes a file.
SHARD_FILES_BYTES_MAX = 256 * MIB
# A file up to this size rides in the listing; Flink's `state.storage.fs.memory-threshold`.
SMALL_FILE_BYTES_MAX = 20 * KIB

# A savepoint's record is read whenever savepoints are listed; these keep it below SMALL_JSON_BYTES_MAX.
SAVEPOINT_TAGS_MAX = 64
SAVEPOINT_NOTE_CHARS_MAX = 4_000

# Why a migration was taken back, in a line.
MIGRATION_REASON_CHARS_MAX = 2_000

# A plan of a deletion, as a document: about 200 bytes a line. What garbage collection finds beyond is in the next plan.
PLAN_BYTES_MAX = 512 * MIB
PLAN_OBJECTS_MAX = 500_000

# A step of the wall clock beyond this is not believed at once (base/trusted_clock.py). S3 refuses requests whose clock
# is as far off; corrections by NTP and pauses of a virtual machine are far below.
CLOCK_JUMP_MS = 900_000
# So long a step must last where nothing but the clock itself tells of it: wrong clocks are mostly set right in minutes.
CLOCK_LASTS_S = 1_800.0
