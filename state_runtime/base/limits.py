"""Bounds on all data that is read from outside, in one place."""

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
# A column of text or binary ends at 2 GiB in Arrow. So stored rows are merged in pieces of this size; a piece is larger
# only if one key is larger. Two versions of the largest key that may be written still fit.
FOLD_BYTES_MAX = 256 * MIB
KEY_BYTES_MAX = GIB
# Approximate number of tables of all states in a manifest: each takes 260 bytes, and half of a manifest is for them.
TABLES_MAX = MANIFEST_BYTES_MAX // 2 // 260

MAX_PARALLELISM = 32768  # key groups: the top 15 bits of the key hash
KEY_GROUP_BITS = 15

PATH_CHARS_MAX = 1024
NAME_CHARS_MAX = 63

# Commit and term claims are abandoned after this many lost races in a row: more means something is wrong, not slow.
CLAIM_ATTEMPTS_MAX = 16
# Read-back after a write with an unknown outcome.
READ_BACK_ATTEMPTS_MAX = 5

# The log of files that a source has seen: one stored object or part of it, which a reader loads into memory. Writers
# stay far below, so that parts that are joined later still fit.
SOURCE_LOG_BYTES_MAX = 256 * MIB
SOURCE_LOG_PART_BYTES_MAX = 32 * MIB
# All of one source's log: about 28 million names of 150 bytes. It is streamed, so memory does not bound it; Spark
# itself reads and writes all of it each time it compacts.
SOURCE_LOG_TOTAL_BYTES_MAX = 4 * GIB
# Files of other sources in Spark's checkpoint directory are stored in each manifest. A rate source has 16 bytes, Kafka
# about 20 a partition.
SOURCE_FILES_MAX = 64
SOURCE_FILES_BYTES_MAX = MIB

# Entries that the epochs of one checkpoint may add to its manifest: about 300 bytes a file or segment. If there are
# more, a checkpoint is made early.
PENDING_FILES_MAX = 2_000
PENDING_SEGMENTS_MAX = 256
# Entries of them that the driver keeps in memory: above these numbers parts in memory are flushed, and objects that
# tasks uploaded cause a checkpoint.
PENDING_PARTS_MAX = 50_000
PENDING_OBJECTS_MAX = 50_000

# With the changelog off: the listing of all shards' files; about 250 bytes a file.
SHARD_FILES_BYTES_MAX = 256 * MIB
# A file up to this size is stored in the listing; Flink's `state.storage.fs.memory-threshold`.
SMALL_FILE_BYTES_MAX = 20 * KIB

# A savepoint's record is read whenever savepoints are listed; these keep it below SMALL_JSON_BYTES_MAX.
SAVEPOINT_TAGS_MAX = 64
SAVEPOINT_NOTE_CHARS_MAX = 4_000

# Maximum length of a migration's rollback reason, in one line.
MIGRATION_REASON_CHARS_MAX = 2_000

# A plan of a deletion, as a document: about 200 bytes a line. Objects above the maximum are in the next plan.
PLAN_BYTES_MAX = 512 * MIB
PLAN_OBJECTS_MAX = 500_000

# A step of the wall clock above this is not believed at once (base/trusted_clock.py). S3 refuses requests whose clock
# differs as much; corrections by NTP and pauses of a virtual machine are far below.
CLOCK_JUMP_MS = 900_000
# How long a step must last if only the clock itself confirms it: wrong clocks are mostly corrected in minutes.
CLOCK_LASTS_S = 1_800.0
