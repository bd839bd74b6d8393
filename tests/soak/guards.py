"""Guards of the runtime, taken out one by one: `make guards`. Red if a removal is not noticed by the law that names it.

    python -m tests.soak.guards
    python -m tests.soak.guards --only inflight-copy-digest commit-rows-look

A *guard* is a piece of code that nothing needs on a good day: without it everything works until the one moment that it is there
for. So a change that loses one is not seen, unless a test is there for that moment. `GUARDS` says of each which test that is.
What is removed is text: a copy of the tree gets the file without the piece, and the law is run there. First all laws
are run with everything in place.

How it relates to `tests/simulation/test_guards.py`: that one asks of the simulation whether its seeds find a guard missing, and takes
whole functions out while it runs. This one asks of every law that `make test` runs. A guard that only an interleaving shows stands
there; all others belong here. `tests/soak/test_guards_list.py` keeps the list true: each piece is in its file, once, and each law exists.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GUARDS", "ROOT", "Guard", "copy_of_the_tree", "environment_of", "refuse_another_tree", "without"]

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("state_runtime", "orchestration", "assets", "stillstate", "examples", "benchmarks", "tests", "docs")
BESIDE = ("pyproject.toml", "setup.cfg", "README.md", "CHANGELOG.md", "Makefile")
LAW_S_MAX = 900
RED = 1
"""What pytest exits with if tests have failed; anything else is no answer."""


@dataclass(frozen=True)
class Guard:
    """A piece of code, and the test that fails without it.

    Attributes:
        file: below the project's root.
        code: the piece; in the file exactly once.
        removal: what is there without it.
        law: the test, as pytest names it.
    """

    name: str
    file: str
    code: str
    removal: str
    law: str


_BATCH_BOOK = "tests/state_runtime/driver/test_batch_progress.py::"
_SCHEDULE = "tests/state_runtime/driver/test_inflight_schedule.py::"
_DRIVER = "tests/state_runtime/driver/test_driver_schedule.py::"
_AS_OF = "tests/state_runtime/processors/test_processors_as_of_join.py::"
_QUERIES = "tests/state_runtime/pipeline/test_compatibility.py::"
_TABLES = "tests/state_runtime/driver/test_tables.py::"
_OF_SPARK = "tests/spark/test_queries.py::"
_CLOCKS = "tests/state_runtime/pipeline/test_clocks.py::"
_NAMES = "tests/state_runtime/pipeline/test_source_names.py::"
_TIME = "tests/state_runtime/driver/test_processing_time.py::"
_FIT = "tests/state_runtime/pipeline/test_inflight_fit.py::"
_STAGE = "tests/state_runtime/task/test_stage_task.py::"
_SLEEPERS = "tests/state_runtime/snapshot/test_sleepers.py::"
_COMMIT = "tests/state_runtime/snapshot/test_snapshot_commit.py::"
_OWNERSHIP = "tests/state_runtime/snapshot/test_ownership.py::"
_GC = "tests/state_runtime/maintenance/test_maintenance_gc.py::"

_WITHDRAWING = "tests/state_runtime/maintenance/test_withdrawing.py::"
_DELTA_BACK = "tests/state_runtime/sinks/test_delta_rollback.py::"
_ROLLBACK = "tests/spark/test_rollback_output.py::"
_SOURCE = "tests/state_runtime/sources/"
_DELTA = "tests/state_runtime/sinks/test_delta.py::"
_ICEBERG = "tests/state_runtime/sinks/test_iceberg.py::"
_SQL = "tests/state_runtime/sinks/test_sql_server.py::"
_SQL_ROWS = "tests/state_runtime/sinks/test_sql_rows.py::"
_KAFKA = "tests/state_runtime/sinks/test_kafka_servers.py::"

_WAITING = "tests/state_runtime/driver/test_waiting_outputs.py::"

GUARDS: tuple[Guard, ...] = (
    # --- sinks that are away -------------------------------------------------------------------------------------------
    Guard(
        "a-rollback-fences-writers-of-a-delta-table",
        "state_runtime/sinks/delta_log.py",
        "        self._fence(writer, last)\n",
        "",
        f"{_DELTA_BACK}test_a_driver_that_slept_commits_no_epoch_that_was_left",
    ),
    Guard(
        "a-restored-delta-table-keeps-commits-of-others",
        "state_runtime/sinks/delta_history.py",
        "raise ForeignCommit(*foreign, first)",
        "pass",
        f"{_DELTA_BACK}test_a_commit_of_another_writer_behind_the_first_such_epoch_is_never_lost",
    ),
    Guard(
        "what-a-restore-took-out-is-passed-over",
        "state_runtime/sinks/delta_history.py",
        'version = int(of["operationParameters"]["version"])',
        "version -= 1",
        f"{_DELTA_BACK}test_a_table_is_what_it_was_before_the_epochs_that_were_left",
    ),
    Guard(
        "a-snapshot-says-what-is-taken-out-before-it-is",
        "state_runtime/snapshot/fencing.py",
        'withdrawing(replace(content, kind="fencing", previous=None), withdraw)',
        'withdrawing(replace(content, kind="fencing", previous=None), ())',
        f"{_ROLLBACK}test_after_a_job_went_back_each_row_is_there_once",
    ),
    Guard(
        "nobody-goes-back-to-what-was-taken-out",
        "state_runtime/snapshot/fencing.py",
        "gone = withdrawn_outputs(target, newest)",
        "gone = withdrawn_outputs(target, newest)[:0]",
        f"{_ROLLBACK}test_after_a_job_went_back_each_row_is_there_once",
    ),
    Guard(
        "staged-files-of-fenced-runs-go-before-output-is-taken-out",
        "state_runtime/driver/checkpointer.py",
        "            spec.remove_abandoned(term.term, named, since_terms[name])\n",
        "            named.clear()\n",
        f"{_ROLLBACK}test_no_fenced_run_has_staged_files_when_output_is_taken_out",
    ),
    Guard(
        "a-compaction-does-not-bring-back-what-was-taken-out",
        "state_runtime/pipeline/compactions.py",
        "if any(mine.intersection(_read(store, number).inputs) for number in range(known + 1, newest + 1)):",
        "if False:",
        f"{_WITHDRAWING}test_a_compaction_that_slept_brings_no_row_back",
    ),
    Guard(
        "packed-rows-keep-the-order-of-tasks",
        "state_runtime/driver/packed_outputs.py",
        "if staged.files and rows[staged.sink]:",
        "if False:",
        "tests/state_runtime/driver/test_packed_outputs.py::test_what_tasks_wrote_is_what_is_published_in_their_order",
    ),
    Guard(
        "what-waits-is-named-by-each-manifest",
        "state_runtime/driver/checkpointer.py",
        "outputs=(*self.waiting.named, *interval.outputs),",
        "outputs=interval.outputs,",
        f"{_WAITING}test_what_waited_when_a_run_was_killed_is_published_by_the_next_one",
    ),
    Guard(
        "what-waits-is-not-settled",
        "state_runtime/driver/checkpointer.py",
        "if output.sink in context.sinks and output not in done.manifest.outputs:",
        "if output.sink in context.sinks:",
        f"{_WAITING}test_what_is_staged_stays_until_a_manifest_no_longer_names_it",
    ),
    Guard(
        "newer-output-waits-behind-older",
        "state_runtime/driver/checkpointer.py",
        "if waiting.is_away(output.sink):",
        "if False:",
        f"{_WAITING}test_whatever_ends_runs_whose_sink_comes_and_goes_each_batch_is_published_once",
    ),
    Guard(
        "a-thread-that-slept-proves-the-root-is-its-own",
        "state_runtime/driver/waiting_outputs.py",
        "                self._prove()\n",
        "",
        f"{_WAITING}test_a_run_that_was_fenced_publishes_nothing_that_waited",
    ),
    Guard(
        "what-waits-is-bounded",
        "state_runtime/driver/epochs.py",
        "        self._wait_while_held_up()\n        with self._turn() as is_wanted:\n            # Returning",
        "        with self._turn() as is_wanted:\n            # Returning",
        f"{_WAITING}test_beyond_the_bound_no_epoch_begins_until_the_sink_takes_some",
    ),
    Guard(
        "a-history-with-undelivered-output-is-not-gone-back-to",
        "state_runtime/snapshot/lineage.py",
        "        undelivered=_left_undelivered(target, newest, is_delivered),\n",
        "",
        f"{_WAITING}test_a_history_that_was_left_with_output_that_waited_is_not_gone_back_to",
    ),
    Guard(
        "output-that-waits-is-not-recorded-as-published",
        "state_runtime/driver/checkpointer.py",
        "if published is None or self.waiting.named:",
        "if published is None:",
        f"{_WAITING}test_a_run_that_ends_while_a_sink_is_away_says_what_waits_and_the_next_one_publishes_it",
    ),
    # --- sinks: each epoch once ----------------------------------------------------------------------------------------
    Guard(
        "delta-looks-again-before-it-commits",
        "state_runtime/sinks/delta_log.py",
        "        if int(table.transaction_version(writer) or 0) >= version:\n            return False\n",
        "",
        f"{_DELTA}test_two_drivers_that_commit_at_the_same_moment_make_one_commit",
    ),
    Guard(
        "delta-knows-who-writes",
        "state_runtime/sinks/delta.py",
        'owner = f"{job_name}-{job_uid[:8]}-{name}"',
        'owner = f"{job_name}-{name}"',
        f"{_DELTA}test_delta_keeps_the_contract_of_sinks",
    ),
    Guard(
        "iceberg-looks-before-it-commits",
        "state_runtime/sinks/iceberg_log.py",
        "            if _version(table, writer) >= version:\n                return False\n",
        "",
        f"{_ICEBERG}test_two_drivers_that_commit_at_the_same_moment_make_one_commit",
    ),
    Guard(
        "iceberg-is-not-tried-again-behind-its-back",
        "state_runtime/sinks/iceberg_log.py",
        "transaction = _without_retries(table).transaction()",
        "transaction = table.transaction()",
        f"{_ICEBERG}test_two_drivers_that_commit_at_the_same_moment_make_one_commit",
    ),
    Guard(
        "iceberg-knows-who-writes",
        "state_runtime/sinks/iceberg.py",
        'f"{job_uid}-{name}"',
        "name",
        f"{_ICEBERG}test_iceberg_keeps_the_contract_of_sinks",
    ),
    Guard(
        "iceberg-owners-are-made-once",
        "state_runtime/sinks/iceberg_log.py",
        "            self._commit(table, {_OWNER + path: body.decode()}, _nothing)\n",
        "            self._commit(table, {_OWNER + path: body.decode()}, lambda *_: None)\n",
        f"{_ICEBERG}test_of_two_that_claim_a_table_at_the_same_moment_one_owns_it",
    ),
    Guard(
        "iceberg-of-a-root-and-its-copy-one-writes",
        "state_runtime/sinks/iceberg.py",
        "        own_output(self._log, spec.staging_prefix, claimant)\n",
        "",
        "tests/spark/test_iceberg_job.py::test_a_copy_of_a_root_is_refused_while_the_original_is_there",
    ),
    Guard(
        "iceberg-null-is-a-key",
        "state_runtime/sinks/merge_rows.py",
        'null_encoding="encode"',
        'null_encoding="mask"',
        f"{_ICEBERG}test_rows_are_merged_and_removed_by_key",
    ),
    Guard(
        "iceberg-null-keys-are-looked-for",
        "state_runtime/sinks/iceberg_rows.py",
        "ex.Or(one, ex.IsNull(name)) if column.null_count else one",
        "one",
        f"{_ICEBERG}test_a_null_key_is_found_in_a_file_that_has_no_other",
    ),
    Guard(
        "iceberg-shows-no-secret",
        "state_runtime/sinks/iceberg_log.py",
        'return self._address.redact(f"{type(error).__name__}: {first}")',
        'return f"{type(error).__name__}: {first}"',
        f"{_ICEBERG}test_no_secret_of_a_catalog_is_shown",
    ),
    Guard(
        "sql-looks-before-it-writes",
        "state_runtime/sinks/sql_table.py",
        "                if _number(connection, epochs.lock(writer)) >= epoch:\n                    return False\n",
        "",
        f"{_SQL}test_a_server_that_dies_with_the_answer_to_a_commit_has_the_rows_once",
    ),
    Guard(
        "sql-waits-for-the-other-driver",
        "state_runtime/sinks/sql_statements.py",
        " FOR UPDATE",
        "",
        f"{_SQL}test_two_drivers_of_one_writer_wait_for_each_other",
    ),
    Guard(
        "sql-knows-who-writes",
        "state_runtime/sinks/sql.py",
        'f"{job_uid}-{name}"',
        "name",
        f"{_SQL}test_a_table_keeps_the_contract_of_sinks",
    ),
    Guard(
        "sql-has-its-epochs-on-disk",
        "state_runtime/sinks/sql_table.py",
        "    \"SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'\",\n",
        "",
        f"{_SQL}test_an_epoch_that_a_server_has_confirmed_is_there_after_its_crash",
    ),
    Guard(
        "sql-reads-what-is-committed",
        "state_runtime/sinks/sql_address.py",
        "        connection.read_only = False\n",
        "",
        f"{_SQL}test_the_servers_own_isolation_does_not_matter",
    ),
    Guard(
        "sql-makes-tables-one-after-the-other",
        "state_runtime/sinks/sql_table.py",
        '        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MAKING])\n',
        "",
        f"{_SQL}test_two_drivers_that_both_make_the_table_make_one",
    ),
    Guard(
        "sql-null-is-a-key",
        "state_runtime/sinks/sql_catalog.py",
        " and (nulls_are_equal or not can_be_null & columns)",
        "",
        f"{_SQL_ROWS}test_rows_are_merged_only_into_a_table_that_has_each_key_once",
    ),
    Guard(
        "sql-not-into-unlogged-tables",
        "state_runtime/sinks/sql_catalog.py",
        'if not refusal and persistence != "p":',
        "if False:",
        f"{_SQL_ROWS}test_what_does_not_fit_the_table_is_refused_before_a_row",
    ),
    Guard(
        "sql-shows-no-value-of-a-row",
        "state_runtime/sinks/sql_table.py",
        "raise explained(error, self.place, columns, self._address.redact) from None",
        "raise explained(error, self.place, columns, self._address.redact) from error",
        f"{_SQL_ROWS}test_rows_that_the_table_does_not_take_end_the_run_with_the_columns_name_and_no_value",
    ),
    Guard(
        "sql-text-is-looked-at-before-the-checkpoint",
        "state_runtime/pipeline/staging.py",
        "        if self._spec.is_for_sql:\n            self._refuse_text(batch)\n",
        "",
        "tests/state_runtime/sinks/test_sql.py::test_text_that_no_database_holds_is_refused_before_the_checkpoint",
    ),
    Guard(
        "sql-of-a-root-and-its-copy-one-writes",
        "state_runtime/sinks/sql.py",
        "        own_output(SqlOwners(self._table), spec.staging_prefix, claimant)\n",
        "",
        "tests/spark/test_sql_job.py::test_a_copy_of_a_root_is_refused_while_the_original_is_there",
    ),
    Guard(
        "kafka-looks-before-it-fences",
        "state_runtime/sinks/kafka_log.py",
        "            if self._has(self._look(stable=False), mark):\n                return False\n",
        "",
        f"{_KAFKA}test_kafka_keeps_the_contract_of_sinks",
    ),
    Guard(
        "sinks-look-again-before-they-call-rows-lost",
        "state_runtime/pipeline/staged_rows.py",
        "        if not is_there():\n            raise\n",
        "        raise\n",
        f"{_ICEBERG}test_iceberg_keeps_the_contract_of_sinks",
    ),
    Guard(
        "kafka-reads-errors-behind-callbacks",
        "state_runtime/sinks/kafka_access.py",
        "return raised.args[0] if isinstance(raised, library().KafkaException) else None",
        "return None",
        "tests/state_runtime/sinks/test_kafka_sink.py::"
        "test_an_error_means_the_same_if_a_callback_was_called_while_it_was_raised",
    ),
    Guard(
        "kafka-looks-before-it-writes",
        "state_runtime/sinks/kafka_log.py",
        "        if self._has(self._newest, mark):\n            return False\n",
        "",
        f"{_KAFKA}test_a_crash_anywhere_in_a_transaction_is_repaired_by_the_next_driver",
    ),
    Guard(
        "kafka-has-the-number-in-the-transaction",
        "state_runtime/sinks/kafka_log.py",
        "            _in_time(lambda: producer.send_offsets_to_transaction([offset], group, _NUMBER_S_MAX))\n",
        "",
        f"{_KAFKA}test_kafka_keeps_the_contract_of_sinks",
    ),
    Guard(
        "kafka-knows-who-writes",
        "state_runtime/sinks/kafka.py",
        'writer = f"stillstate-{spec.root_id}-{spec.name}"',
        'writer = f"stillstate-{spec.name}"',
        f"{_KAFKA}test_kafka_keeps_the_contract_of_sinks",
    ),
    Guard(
        "kafka-does-not-guess-a-number-that-is-gone",
        "state_runtime/sinks/kafka_log.py",
        "            raise self._forgotten(mark)\n",
        "",
        f"{_KAFKA}test_a_number_that_is_gone_is_not_guessed",
    ),
    Guard(
        "kafka-first-start-writes-a-number",
        "state_runtime/sinks/kafka_log.py",
        "EpochMark(0) if self._newest is None and is_new else self._newest",
        "self._newest",
        f"{_KAFKA}test_a_first_start_leaves_a_number_so_that_its_absence_means_something",
    ),
    Guard(
        "kafka-tells-a-copy-from-a-repetition",
        "state_runtime/sinks/kafka_log.py",
        "if found.epoch == mark.epoch and found.digest != mark.digest:",
        "if False:",
        f"{_KAFKA}test_a_copy_of_the_root_is_not_taken_for_the_root",
    ),
    Guard(
        "kafka-gives-up-a-coordinator-that-does-not-answer",
        "state_runtime/sinks/kafka_log.py",
        "answer.result(_NUMBER_S_MAX + 1)",
        "answer.result()",
        f"{_KAFKA}test_a_broker_that_is_killed_in_a_transaction_costs_no_row_and_doubles_none",
    ),
    Guard(
        "kafka-source-knows-the-topic",
        "state_runtime/sources/kafka_offsets.py",
        "if start.ids.get(topic, ids[topic]) != ids[topic]:",
        "if False:",
        f"{_SOURCE}test_kafka_offsets.py::test_a_topic_that_was_made_again_is_not_taken_for_the_old_one",
    ),
    Guard(
        "kafka-source-looks-for-what-is-lost",
        "state_runtime/sources/kafka.py",
        "                check_not_gone(parts, earliest)\n",
        "                pass\n",
        f"{_SOURCE}test_kafka_source.py::test_records_that_are_gone_end_the_run_or_are_passed_over",
    ),
    Guard(
        "kafka-source-reads-what-is-committed",
        "state_runtime/sources/kafka_client.py",
        "level.READ_COMMITTED if self._isolation",
        "level.READ_UNCOMMITTED if self._isolation",
        f"{_SOURCE}test_kafka_source.py::test_records_of_a_transaction_come_when_it_is_committed_and_never_if_it_is_not",
    ),
    Guard(
        "a-watch-of-sources-ends-nothing",
        "state_runtime/sources/watch.py",
        "            except Exception:\n",
        "            except StillstateError:\n",
        f"{_SOURCE}test_watch.py::test_an_error_in_the_numbers_ends_nothing",
    ),
    Guard(
        "a-handle-ends-with-python",
        "state_runtime/driver/run_handle.py",
        "        atexit.register(self._end_with_python)\n",
        "",
        "tests/spark/test_run_handle.py::test_a_script_that_ends_while_its_run_is_there_ends_it_with_a_checkpoint",
    ),
    # --- rows in flight: which operators are done, and what is due -------------------------------------------------
    Guard(
        "inflight-settled-above-only",
        "state_runtime/driver/batch_progress.py",
        "takewhile(lambda o: o.uid in before, operators)",
        "(o for o in operators if o.uid in before)",
        f"{_BATCH_BOOK}test_a_batch_ends_with_the_operators_that_the_pipeline_has_now",
    ),
    Guard(
        "inflight-settled-of-the-pipeline",
        "state_runtime/driver/batch_progress.py",
        "settled = frozenset(o.uid for o in takewhile(lambda o: o.uid in before, operators))",
        "settled = before",
        f"{_BATCH_BOOK}test_a_batch_ends_with_the_operators_that_the_pipeline_has_now",
    ),
    Guard(
        "inflight-begun-after-rescale",
        "state_runtime/driver/batch_progress.py",
        "parallelism == parallelism_before and ",
        "",
        f"{_BATCH_BOOK}test_after_a_rescale_all_that_is_due_is_looked_at_once_more",
    ),
    Guard(
        "inflight-begun-of-the-first-open-operator",
        "state_runtime/driver/batch_progress.py",
        " and batch.begun == progress.level(operators)",
        "",
        f"{_BATCH_BOOK}test_below_a_new_operator_all_that_is_due_is_looked_at_once_more",
    ),
    Guard(
        "inflight-begun-not-woken",
        "state_runtime/driver/due.py",
        "has_begun = batch.begun_with == operator.uid",
        "has_begun = False",
        f"{_BATCH_BOOK}test_a_timer_that_sets_one_that_is_due_already_fires_again_with_the_next_batch",
    ),
    Guard(
        "inflight-due-was-done",
        "state_runtime/task/slicing.py",
        "was_done = self._budget.due_was_done and not any(p.epoch for p in self._passes)",
        "was_done = False",
        f"{_SCHEDULE}test_what_became_due_again_waits_for_the_next_batch_in_shards_that_are_visited_all_the_same",
    ),
    Guard(
        "inflight-settled-not-woken",
        "state_runtime/driver/due.py",
        ' or (operator.time_domain == "event" and operator.uid in batch.settled)',
        "",
        f"{_BATCH_BOOK}test_a_timer_that_sets_one_that_is_due_already_fires_again_with_the_next_batch",
    ),
    Guard(
        "inflight-due-before-settled",
        "state_runtime/driver/batch_progress.py",
        'if operator.time_domain == "event" and uid not in did_due and is_due(uid):',
        "if False:",
        f"{_BATCH_BOOK}test_a_batch_ends_with_the_operators_that_the_pipeline_has_now",
    ),
    Guard(
        "inflight-listing-stale",
        "state_runtime/driver/batch_progress.py",
        'listed_in=self.listed_in if tuple(left_over) == self.passes else "",',
        "listed_in=self.listed_in,",
        f"{_BATCH_BOOK}test_a_listing_serves_until_some_of_its_rows_are_done",
    ),
    Guard(
        "inflight-rows-without-batch",
        "state_runtime/driver/epoch.py",
        'check(not any(left for a in run.acknowledged for left in a.left.values()), "rows are left without a batch")',
        "pass",
        f"{_SCHEDULE}test_rows_that_an_epoch_without_a_batch_leaves_fail_it",
    ),
    # --- rows in flight: what a start and a task look at -----------------------------------------------------------
    Guard(
        "inflight-deciding-columns",
        "state_runtime/pipeline/inflight_fit.py",
        "for name in reads.deciding:",
        "for name in ():",
        f"{_FIT}test_rows_without_a_column_that_says_whether_they_count_are_refused",
    ),
    Guard(
        "inflight-deciding-of-the-pipeline",
        "state_runtime/pipeline/compile.py",
        ", deciding_columns(s.operator)",
        "",
        f"{_FIT}test_rows_without_a_column_that_says_whether_they_count_are_refused",
    ),
    Guard(
        "inflight-partial-functions",
        "state_runtime/pipeline/inflight_fit.py",
        " and layout.functions != reads.functions:",
        " and False:",
        f"{_FIT}test_rows_that_spark_aggregated_fit_the_same_functions_only",
    ),
    Guard(
        "inflight-unaggregated-columns",
        "state_runtime/task/stage.py",
        "empty.schema if not are_partial(empty) or self.unaggregated is None else self.unaggregated",
        "empty.schema",
        f"{_STAGE}test_waiting_rows_have_the_columns_that_their_operator_reads_now",
    ),
    Guard(
        "inflight-copy-digest",
        "state_runtime/task/host_rows.py",
        "return body if path is not None and hashlib.sha256(body).hexdigest() == part.digest else None",
        "return body if path is not None else None",
        "tests/state_runtime/task/test_host_rows.py::test_a_damaged_copy_of_rows_in_flight_is_passed_over",
    ),
    Guard(
        "inflight-copies-needed",
        "state_runtime/driver/driver_state.py",
        "return self._committed_rows | (self._batch.needed if self._batch is not None else frozenset())",
        "return frozenset()",
        f"{_SCHEDULE}test_a_restart_in_place_reads_neither_state_nor_rows_in_flight_from_the_store",
    ),
    # --- commits and starts ----------------------------------------------------------------------------------------
    Guard(
        "commit-rows-look",
        "state_runtime/snapshot/commit.py",
        "named = {s.path: s.bytes for s in manifest.stored_segments}",
        "named = {s.path: s.bytes for s in manifest.segments}",
        f"{_SLEEPERS}test_a_run_whose_rows_in_flight_went_with_the_root_commits_no_manifest_that_names_them",
    ),
    Guard(
        "commit-segments-look",
        "state_runtime/snapshot/commit.py",
        "for path, size in named.items()),",
        "for path, size in [*named.items()][-1:]),",
        f"{_DRIVER}test_a_commit_looks_at_every_object_that_its_manifest_is_the_first_to_lead_to",
    ),
    Guard(
        "commit-objects-look",
        "state_runtime/snapshot/commit.py",
        "for path in objects if path not in named),",
        "for path in ()),",
        f"{_DRIVER}test_a_commit_looks_at_every_object_that_its_manifest_is_the_first_to_lead_to",
    ),
    Guard(
        "commit-last-look",
        "state_runtime/snapshot/commit.py",
        "if self._landmark is not None and not self._landmark.is_in(self._root):",
        "if False:",
        f"{_SLEEPERS}test_a_run_that_hung_does_not_fence_the_one_that_goes_on_from_a_backup",
    ),
    Guard(
        "commit-term-look",
        "state_runtime/snapshot/commit.py",
        "pool.submit(self.ownership.check_term),",
        "",
        f"{_SLEEPERS}test_a_run_whose_term_is_another_runs_by_now_commits_nothing",
    ),
    Guard(
        "commit-boundary-gone-between",
        "state_runtime/snapshot/commit.py",
        "if boundary.sequence < sequence:",
        "if False:",
        f"{_SLEEPERS}test_a_run_whose_root_is_removed_while_it_commits_is_never_told_that_it_has",
    ),
    Guard(
        "commit-given-up",
        "state_runtime/snapshot/commit.py",
        "if snapshot_id <= boundary.snapshot_id:",
        "if False:",
        f"{_COMMIT}test_a_collected_id_is_fenced_at_the_start_too",
    ),
    Guard(
        "open-run-snapshots-given-up",
        "state_runtime/snapshot/fencing.py",
        "if latest is None and found is not None:",
        "if False:",
        f"{_SLEEPERS}test_a_start_whose_root_is_removed_meanwhile_leaves_a_place_where_the_job_can_begin_anew",
    ),
    Guard(
        "open-run-first-snapshot-below-its-job",
        "state_runtime/snapshot/fencing.py",
        "        if latest is None:\n",
        "        if False:\n",
        f"{_SLEEPERS}test_a_start_whose_root_is_removed_meanwhile_leaves_a_place_where_the_job_can_begin_anew",
    ),
    Guard(
        "open-run-term-of-a-backup",
        "state_runtime/snapshot/fencing.py",
        "    Ownership(catalog.root, info.uid, term).check_term()\n",
        "",
        f"{_SLEEPERS}test_a_start_whose_term_went_with_a_backup_does_not_begin",
    ),
    Guard(
        "ownership-newer-run",
        "state_runtime/snapshot/ownership.py",
        "if self._newest_snapshot_term() > self.run.term:",
        "if False:",
        f"{_OWNERSHIP}test_a_run_that_only_starts_takes_nothing_from_the_one_before_and_its_first_snapshot_takes_everything",
    ),
    Guard(
        "ownership-mere-start",
        "state_runtime/snapshot/ownership.py",
        "            if self._newest_snapshot_term() > self.run.term:\n    ",
        "",
        f"{_OWNERSHIP}test_a_run_that_only_starts_takes_nothing_from_the_one_before_and_its_first_snapshot_takes_everything",
    ),
    Guard(
        "inflight-ranges-in-order",
        "state_runtime/changelog/inflight.py",
        "            not in_order\n            or not passed.left\n",
        "            not passed.left\n",
        "tests/state_runtime/changelog/test_inflight_passes.py::test_a_pass_that_no_reader_can_count_on_is_damage",
    ),
    Guard(
        "inflight-listing-fits-its-snapshot",
        "state_runtime/changelog/reader.py",
        "if unknown or {p.operator for p in located} != {o.uid for o in batch.operators}:",
        "if False:",
        "tests/state_runtime/changelog/test_inflight_passes.py::test_a_listing_of_other_rows_than_its_snapshot_names_is_damage",
    ),
    Guard(
        "restore-listed-version",
        "state_runtime/restore/shard.py",
        "(listed.parallelism, listed.version) == (parallelism, version) and self._fits(listed)",
        "self._fits(listed)",
        "tests/state_runtime/task/test_changelog_off.py::"
        "test_a_local_version_that_the_listing_does_not_name_is_not_believed",
    ),
    Guard(
        "go-back-lost-output",
        "state_runtime/snapshot/catalog.py",
        "        if len(whole) == len(found.outputs) or self._has_checkpoint_after(found, newest_id, has_claimed):\n",
        "        if True:\n",
        "tests/state_runtime/pipeline/test_sinks.py::test_a_staged_file_that_was_lost_is_never_taken_as_delivered",
    ),
    Guard(
        "term-process-space",
        "state_runtime/snapshot/term_files.py",
        "        process_space=claim.process_space,\n",
        "",
        f"{_COMMIT}test_a_run_that_has_not_spoken_yet_tells_by_its_term_where_its_process_is",
    ),
    Guard(
        "begin-newest-damaged",
        "state_runtime/driver/start_position.py",
        "self._catalog.latest_to_go_back_from() if goes_back else self._catalog.latest()",
        "self._catalog.latest_to_go_back_from()",
        "tests/state_runtime/driver/test_beginning.py::test_a_damaged_newest_snapshot_stops_a_run_unless_it_was_told_where_to_go_back_to",
    ),
    Guard(
        "file-book-incomplete",
        "state_runtime/driver/file_index.py",
        ", complete=not stored)",
        ")",
        "tests/state_runtime/driver/test_file_book.py::test_the_first_run_with_the_changelog_off_visits_every_shard_that_has_state",
    ),
    Guard(
        "restore-empty-batch",
        "state_runtime/restore/stream.py",
        "        if batch.num_rows == 0:\n            continue\n",
        "        if batch.num_rows == 0:\n            break\n",
        "tests/state_runtime/restore/test_stream.py::test_a_sorted_source_stays_whole_however_it_is_cut",
    ),
    # --- deletions and copies --------------------------------------------------------------------------------------
    Guard(
        "gc-previous-boundary",
        "state_runtime/maintenance/gc/survey.py",
        "number >= self.existing.boundary.sequence - 1)",
        "number >= self.existing.boundary.sequence)",
        f"{_GC}test_requests_answers_probes_old_terms_boundaries_and_void_pins_go",
    ),
    Guard(
        "gc-floor",
        "state_runtime/maintenance/gc/survey.py",
        "and o.modified_ms < self.watermark_ms - self.floor_ms\n",
        "and o.modified_ms < self.watermark_ms\n",
        f"{_GC}test_the_floor_is_measured_from_the_newest_manifest",
    ),
    Guard(
        "gc-watermark",
        "state_runtime/maintenance/gc/survey.py",
        "and o.modified_ms < self.watermark_ms - self.floor_ms\n",
        "and o.modified_ms < self.told_ms - self.floor_ms\n",
        f"{_GC}test_what_is_younger_than_the_newest_manifest_is_kept_however_old_it_is",
    ),
    Guard(
        "gc-under-way-by-name",
        "state_runtime/maintenance/gc/survey.py",
        "\n            and not self._is_under_way(kind, o.path)",
        "",
        f"{_GC}test_what_is_for_a_snapshot_to_come_is_kept_whatever_the_stores_clock_said",
    ),
    Guard(
        "gc-missing-refuses",
        "state_runtime/maintenance/gc/survey.py",
        "self._check([*missing, *wrong])",
        "pass",
        f"{_GC}test_a_missing_file_that_is_needed_refuses_and_is_named_with_its_snapshot",
    ),
    Guard(
        "gc-size-refuses",
        "state_runtime/maintenance/gc/survey.py",
        "self._check([*missing, *wrong])",
        "self._check([*missing])",
        f"{_GC}test_a_file_of_another_size_refuses",
    ),
    Guard(
        "gc-both-passes",
        "state_runtime/maintenance/gc/collect.py",
        "if (c.path, c.bytes, c.modified_ms) in wanted]",
        "]",
        f"{_GC}test_only_what_both_passes_found_is_deleted",
    ),
    Guard(
        "gc-of-the-same-job",
        "state_runtime/snapshot/ownership.py",
        "if info is None or info.uid != self.job_uid:",
        "if False:",
        f"{_SLEEPERS}test_a_deletion_of_snapshots_that_slept_leaves_the_next_job_alone",
    ),
    Guard(
        "gc-since-the-boundary",
        "state_runtime/snapshot/ownership.py",
        'wanted"\n            )\n        if since and newest_boundary_sequence(self.root) < since:',
        'wanted"\n            )\n        if False:',
        f"{_SLEEPERS}test_a_collection_that_slept_removes_nothing_that_only_a_backups_snapshots_need",
    ),
    Guard(
        "retention-share-of-the-driver",
        "state_runtime/maintenance/retention/background.py",
        "if policy.goes_by_age and len(doomed) > checkpoints_in_a_round(self._settings):",
        "if False:",
        "tests/state_runtime/maintenance/test_maintenance_background.py::test_a_jump_of_the_clock_costs_no_history",
    ),
    Guard(
        "copy-by-content",
        "state_runtime/maintenance/copy/objects.py",
        "        if need.digest or need.parts:\n            return self._reads_back(need, scratch)\n        return need",
        "        return need",
        "tests/state_runtime/maintenance/test_copying.py::test_what_is_in_the_target_is_believed_by_its_content",
    ),
    # --- clocks and data -------------------------------------------------------------------------------------------
    Guard(
        "clock-jump-lasts",
        "state_runtime/base/trusted_clock.py",
        "if doubt.is_contradicted or now_s - doubt.since_s < CLOCK_LASTS_S:",
        "if doubt.is_contradicted:",
        f"{_TIME}test_a_jump_of_the_clock_is_not_believed_before_it_has_lasted",
    ),
    Guard(
        "clock-jump-contradicted",
        "state_runtime/base/trusted_clock.py",
        "if doubt.is_contradicted or now_s - doubt.since_s < CLOCK_LASTS_S:",
        "if now_s - doubt.since_s < CLOCK_LASTS_S:",
        f"{_TIME}test_the_stores_clock_confirms_a_jump_or_contradicts_it",
    ),
    Guard(
        "clock-answer-that-took-long",
        "state_runtime/base/trusted_clock.py",
        "if (self._clock.monotonic_s() - asked_s) * 1000 <= CLOCK_JUMP_MS / 2:",
        "if True:",
        f"{_TIME}test_an_answer_that_took_long_neither_confirms_a_jump_nor_contradicts_it",
    ),
    Guard(
        "shared-rows",
        "state_runtime/driver/epoch_plan.py",
        "        elif readers > 1 and not is_apart:\n",
        "        elif readers > 99:\n",
        "tests/spark/test_branches.py::test_a_step_that_is_read_twice_runs_once",
    ),
    Guard(
        "kept-plans-of-branches-by-partitions",
        "state_runtime/driver/epoch_plan.py",
        "        shape = (shape, made.partitions(frame))\n",
        "        pass\n",
        "tests/spark/test_rebound.py::test_a_plan_of_branches_is_kept_for_each_number_of_partitions",
    ),
    Guard(
        "positions-by-name",
        "state_runtime/pipeline/source_names.py",
        "        numbers += known or new\n",
        "        numbers += range(len(numbers), len(numbers) + source.streams)\n",
        f"{_NAMES}test_each_source_reads_on_where_it_was",
    ),
    Guard(
        "missing-source",
        "state_runtime/pipeline/source_names.py",
        "    if missing and not allow_dropped:\n",
        "    if missing and not allow_dropped and not sources:\n",
        f"{_NAMES}test_a_source_that_is_missing_is_refused_with_what_is_new",
    ),
    Guard(
        "position-of-a-source-that-is-away",
        "state_runtime/pipeline/source_names.py",
        "    return SourceNumbers(tuple(names), tuple(numbers), before if unread else None)\n",
        "    return SourceNumbers(tuple(names), tuple(numbers), None)\n",
        f"{_NAMES}test_files_and_logs_of_a_source_go_with_its_name",
    ),
    Guard(
        "left-out-once",
        "state_runtime/pipeline/source_names.py",
        " if number not in away))\n",
        "))\n",
        f"{_NAMES}test_a_source_that_was_left_out_once_is_not_asked_for_again",
    ),
    Guard(
        "idle-by-batches-alone",
        "state_runtime/pipeline/watermark.py",
        "        if not reads:\n",
        "        if False:\n",
        f"{_CLOCKS}test_no_source_becomes_idle_while_nothing_is_read",
    ),
    Guard(
        "clock-by-the-operators-before",
        "state_runtime/pipeline/watermark.py",
        "            of_inputs += [clocks[each] - self.held_back_ms.get(each, 0) for each in before]\n",
        "            of_inputs += [] if of_inputs else [clocks[each] - self.held_back_ms.get(each, 0) for each in before]\n",
        f"{_CLOCKS}test_no_operator_drops_what_another_one_gives_it_and_answers_are_those_of_a_batch_query",
    ),
    Guard(
        "clock-held-back-behind-a-join",
        "state_runtime/pipeline/watermark.py",
        "[clocks[each] - self.held_back_ms.get(each, 0) for each in before]",
        "[clocks[each] for each in before]",
        f"{_CLOCKS}test_no_operator_drops_what_another_one_gives_it_and_answers_are_those_of_a_batch_query",
    ),
    Guard(
        "late-by-the-operators-own-clock",
        "state_runtime/driver/stage_tasks.py",
        "            job=job.of_operator(uid),\n",
        "            job=job,\n",
        "tests/spark/test_several_sources.py::"
        "test_several_sources_give_what_a_batch_query_gives_each_operator_by_its_own_clock",
    ),
    Guard(
        "nothing-is-idle-before-a-run-could-read",
        "state_runtime/driver/driver_state.py",
        "replace(head, time=replace(head.time, seen_ms={}, idle=()))\n",
        "head\n",
        "tests/state_runtime/driver/test_interval.py::test_no_source_is_idle_while_no_run_could_read_it",
    ),
    # --- plain queries: what a name stands for, and Spark's rows -----------------------------------------------------
    Guard(
        "query-keys-say-the-same",
        "state_runtime/pipeline/compatibility.py",
        "        self._check_says(old, new, where)\n",
        "",
        f"{_QUERIES}test_keys_that_say_something_else_are_refused_although_their_types_fit",
    ),
    Guard(
        "query-functions-are-not-exchanged",
        "state_runtime/pipeline/compatibility.py",
        "            self._check_functions(old, new, where)\n",
        "            pass\n",
        f"{_QUERIES}test_functions_of_a_query_may_come_or_go_and_not_take_each_others_place",
    ),
    Guard(
        "query-numbered-by-what-they-read",
        "state_runtime/pipeline/query.py",
        "is_unsure = naming.wanted[part.name] > 1 or part.is_ambiguous",
        "is_unsure = part.is_ambiguous",
        f"{_OF_SPARK}test_operators_that_only_a_number_tells_apart_are_not_matched_on_doubt",
    ),
    Guard(
        "query-only-times-are-a-range",
        "state_runtime/spark/query_joins.py",
        "if not all(marked) or {id_of(each) for each in items(condition.references().toSeq())} != times:",
        "if not all(marked):",
        f"{_OF_SPARK}test_a_plain_query_gives_what_spark_gives_batch_by_batch",
    ),
    Guard(
        "query-joins-that-keep-rows-for-ever",
        "state_runtime/spark/query_cut.py",
        "if not self._asked.allow_unbounded:",
        "if False:",
        f"{_OF_SPARK}test_what_is_not_supported_is_refused_by_name_before_anything_is_written",
    ),
    Guard(
        "as-of-newest-version-stays",
        "state_runtime/processors/builtin/as_of_join.py",
        "stays[reached[is_newest]] = True",
        "pass",
        f"{_AS_OF}test_the_join_is_two_lists",
    ),
    Guard(
        "as-of-obsolete-versions-go",
        "state_runtime/processors/builtin/as_of_join.py",
        "gone[reached] = True",
        "pass",
        f"{_AS_OF}test_the_join_is_two_lists",
    ),
    Guard(
        "as-of-version-is-of-the-key",
        "state_runtime/processors/builtin/as_of_join.py",
        "newest[found[~is_its]] = -1",
        "pass",
        f"{_AS_OF}test_the_join_is_two_lists",
    ),
    Guard(
        "late-partial-rows-are-no-rows",
        "state_runtime/processors/operator.py",
        "if behind is None:",
        "if True:",
        "tests/state_runtime/processors/test_side_outputs.py::test_partial_rows_are_counted_as_late_and_not_given",
    ),
    Guard(
        "late-rows-are-not-aggregated-by-spark",
        "state_runtime/pipeline/compile.py",
        "partial_rows(operator, chosen.schema) if LATE not in node.sides else None",
        "partial_rows(operator, chosen.schema)",
        "tests/spark/test_side_outputs.py::test_late_rows_come_as_they_were_though_spark_aggregates_the_others",
    ),
    Guard(
        "future-rows-move-no-watermark",
        "state_runtime/pipeline/future_rows.py",
        "    if column.max_ahead_ms is None:\n",
        "    if True:\n",
        "tests/spark/test_future_rows.py::test_rows_of_the_last_day_leave_all_others_in_time[plain]",
    ),
    Guard(
        "future-bound-is-rounded-up",
        "state_runtime/pipeline/future_rows.py",
        "return -(-now_ms // step_ms) * step_ms + max_ahead_ms",
        "return now_ms // step_ms * step_ms + max_ahead_ms",
        "tests/state_runtime/pipeline/test_future_rows.py::test_a_time_within_the_bound_is_never_beyond_it",
    ),
    Guard(
        "future-bound-is-one-of-the-plan",
        "state_runtime/driver/epoch_plan.py",
        "self.in_one_task, woken, self.observed",
        "self.in_one_task, woken",
        "tests/state_runtime/driver/test_plan_shape.py::test_what_decides_a_plan_decides_its_shape",
    ),
    Guard(
        "future-bound-where-spark-alone-sees-times",
        "state_runtime/pipeline/sources.py",
        "if bound_ms is not None and any(column.node is not None for column in own):",
        "if False:",
        "tests/spark/test_future_rows.py::test_a_bound_that_cannot_be_kept_is_refused_before_a_row_is_read",
    ),
    Guard(
        "future-rows-have-no-event-time",
        "state_runtime/pipeline/future_rows.py",
        "F.coalesce(F.col(quoted(n))).alias(n) if n in times else F.col(quoted(n))",
        "F.col(quoted(n))",
        "tests/spark/test_future_rows.py::test_a_bound_that_cannot_be_kept_is_refused_before_a_row_is_read",
    ),
    Guard(
        "bad-rows-null-has-failed",
        "state_runtime/pipeline/expectations.py",
        "F.when(_column(each), F.lit(None)).otherwise(F.lit(name))",
        "F.when(~_column(each), F.lit(name))",
        "tests/spark/test_expectations.py::test_each_row_is_good_or_bad_once_and_bad_rows_come_as_they_were_with_the_reason[plain]",
    ),
    Guard(
        "bad-rows-are-counted-in-the-frame-that-makes-them",
        "state_runtime/driver/epoch_plan.py",
        "return next(filter(None, map(seen, frames)), ())",
        "return seen(frames[0])",
        "tests/spark/test_expectations.py::test_conditions_behind_an_operator_and_behind_each_other_count_what_they_drop",
    ),
    Guard(
        "bad-rows-are-counted-in-a-plan-of-before",
        "state_runtime/spark/rebound.py",
        "self._collect(plan).get(name) for plan in self.plans)",
        "self._collect(plan).get(name) for plan in self.plans[:1])",
        "tests/spark/test_rebound.py::test_rows_that_are_too_far_ahead_or_fail_a_condition_are_counted_by_a_plan_of_before",
    ),
    Guard(
        "query-condition-of-a-join-says-what-it-is",
        "state_runtime/spark/query_cut.py",
        '" AND ".join(map(self._texts.of, bounds.others))',
        '""',
        f"{_OF_SPARK}test_state_of_another_meaning_is_refused_before_a_row",
    ),
    Guard(
        "query-clocks-hidden-from-the-optimizer",
        "state_runtime/spark/catalyst.py",
        "if kind_of(expression) not in _CLOCKS:",
        "if True:",
        f"{_OF_SPARK}test_the_time_of_day_is_one_for_an_epoch_and_new_in_each",
    ),
    Guard(
        "join-null-keys-match-nothing",
        "state_runtime/processors/builtin/interval_join.py",
        "np.where(no_key, rows.groups + side.number, given.group)",
        "given.group",
        "tests/state_runtime/processors/test_processors_interval_join.py::test_the_join_is_two_lists",
    ),
    Guard(
        "join-first-match-of-a-semi-join-is-the-last",
        "state_runtime/processors/builtin/interval_join.py",
        "            stays &= ~new.now\n",
        "            pass\n",
        "tests/state_runtime/processors/test_processors_interval_join.py::test_the_join_is_two_lists",
    ),
    Guard(
        "sinks-behind-names-alone",
        "state_runtime/pipeline/compile.py",
        "if not isinstance(node, SegmentNode) or not node.renames or self.graph.readers(index):",
        "if not isinstance(node, SegmentNode) or not node.renames:",
        f"{_OF_SPARK}test_names_alone_need_no_step_of_their_own_before_a_sink",
    ),
    Guard(
        "query-one-clock",
        "state_runtime/pipeline/compile.py",
        "ClockInputs(sources=node.clock_with | {node.name})",
        "ClockInputs(sources=frozenset({node.name}))",
        f"{_OF_SPARK}test_a_plain_query_gives_what_spark_gives_batch_by_batch",
    ),
    Guard(
        "query-tables-hidden-from-the-optimizer",
        "state_runtime/spark/catalyst.py",
        "if kind_of(node) not in _TABLES or node.isStreaming():",
        "if True:",
        f"{_OF_SPARK}test_a_table_is_read_anew_in_each_epoch_and_a_subquery_that_could_not_be_is_refused",
    ),
    Guard(
        "query-update-mode-drops-late-rows",
        "state_runtime/pipeline/query.py",
        "forgets=bool(part.event_time)",
        "forgets=False",
        f"{_OF_SPARK}test_a_plain_query_gives_what_spark_gives_batch_by_batch",
    ),
    Guard(
        "query-nulls-are-not-left-out-silently",
        "state_runtime/spark/query_functions.py",
        'if name in _COLLECTING and has_method(function, "ignoreNulls") and not function.ignoreNulls():',
        "if False:",
        f"{_OF_SPARK}test_what_is_not_supported_is_refused_by_name_before_anything_is_written",
    ),
    Guard(
        "sessions-last-as-long-as-any-of-their-rows",
        "state_runtime/processors/builtin/sessions.py",
        "starts[1:] > running_max(group, ends)[:-1]",
        "starts[1:] > ends[:-1]",
        "tests/state_runtime/processors/test_processors_windows.py::"
        "test_a_session_of_own_ends_lasts_as_long_as_the_row_of_it_that_ends_last",
    ),
    Guard(
        "rows-that-end-when-they-begin-are-in-no-session",
        "state_runtime/processors/builtin/sessions.py",
        "longer = ends > times",
        "longer = np.ones(len(ends), dtype=np.bool_)",
        "tests/state_runtime/processors/test_processors_windows.py::"
        "test_rows_without_an_end_after_their_time_are_in_no_session_and_not_late",
    ),
    Guard(
        "tables-run-every-shard",
        "state_runtime/driver/due.py",
        "        found |= {uid: list(range(parallelism)) for uid in makes_tables}\n",
        "        pass\n",
        f"{_TABLES}test_in_complete_mode_every_epoch_with_rows_runs_every_shard",
    ),
    Guard(
        "tables-are-of-whole-batches",
        "state_runtime/driver/epoch_budget.py",
        ' != "aligned" and not makes_tables',
        ' != "aligned"',
        f"{_TABLES}test_in_complete_mode_no_epoch_ends_before_its_batch",
    ),
    Guard(
        "tables-are-given-where-they-were-computed",
        "state_runtime/driver/empty_outputs.py",
        "else not tables.isdisjoint(ran)",
        "else True",
        f"{_TABLES}test_a_table_without_rows_is_given_and_a_table_that_was_not_computed_is_not",
    ),
    Guard(
        "tables-come-with-the-last-slice",
        "state_runtime/processors/builtin/aggregate.py",
        "for stored in version.iter_rows(STATE) if due else ():",
        "for stored in version.iter_rows(STATE):",
        "tests/state_runtime/processors/test_processors_aggregate.py::"
        "test_slices_before_the_last_give_nothing_of_a_table",
    ),
    Guard(
        "tables-are-cut-in-one-task",
        "state_runtime/spark/query_cut.py",
        "            if in_one_task:\n",
        "            if False:\n",
        "tests/spark/test_query_tables.py::test_a_limit_without_an_order_lets_every_task_finish",
    ),
    Guard(
        "tables-are-not-added-to-tables",
        "state_runtime/pipeline/compile.py",
        "    if not node.sink.replaces:\n",
        "    if False:\n",
        "tests/spark/test_query_tables.py::test_what_cannot_take_a_table_is_refused_by_name",
    ),
    Guard(
        "deduplicate-clock-moves-without-rows",
        "state_runtime/processors/user/vectorized.py",
        'return "event" if is_by_time else _DOMAINS',
        "return _DOMAINS",
        f"{_OF_SPARK}test_a_plain_query_gives_what_spark_gives_batch_by_batch",
    ),
    Guard(
        "format-of-names",
        "state_runtime/snapshot/manifest.py",
        "    if has_clocks or has_late_clocks or is_of_query or (source is not None and source.names):\n",
        "    if has_clocks or has_late_clocks or is_of_query:\n",
        "tests/state_runtime/snapshot/test_snapshot_document.py::"
        "test_the_format_of_a_manifest_is_the_oldest_that_knows_its_fields",
    ),
    Guard(
        "text-of-the-input",
        "state_runtime/task/gathered.py",
        "        found = broken_text(batch)\n",
        "        found = None\n",
        "tests/state_runtime/task/test_text.py::test_whatever_a_task_accepts_every_reader_reads",
    ),
)


def without(guard: Guard, text: str) -> str:
    """A file's text without the guard.

    Raises:
        LookupError: the piece is not there exactly once; the list is out of date.
    """
    if text.count(guard.code) != 1:
        raise LookupError(f"{guard.name}: {guard.file} has its code {text.count(guard.code)} times: {guard.code!r}")
    return text.replace(guard.code, guard.removal)


def copy_of_the_tree(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "reports", "images")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in BESIDE:
        shutil.copy(ROOT / name, folder / name)
    if (ROOT / ".kafka").exists():  # the broker's jars, of which `make kafka` makes one copy
        (folder / ".kafka").symlink_to((ROOT / ".kafka").resolve())
    return folder


def environment_of(tree: Path) -> dict[str, str]:
    """Of a process that imports a copy of the tree, from its text as it is now."""
    paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


def run(tree: Path, laws: Iterable[str]) -> tuple[int, str]:
    """Laws in a copy of the tree: pytest's exit code, and the end of what it says."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *laws]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment_of(tree), capture_output=True, text=True, timeout=LAW_S_MAX
        )
    except subprocess.TimeoutExpired:
        return -1, f"it took more than {LAW_S_MAX} s"
    return done.returncode, "\n".join(done.stdout.splitlines()[-12:])


def refuse_another_tree(tree: Path) -> None:
    """Laws that import the original would notice nothing, and nothing would say so."""
    found = subprocess.run(
        [sys.executable, "-c", "import state_runtime; print(state_runtime.__file__)"],
        cwd=tree, env=environment_of(tree), capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    if not Path(found).resolve().is_relative_to(tree.resolve()):
        raise SystemExit(f"the copy in {tree} imports {found}: laws would look at code that has all guards")


def unnoticed(guards: Sequence[Guard], tree: Path) -> list[str]:
    """Names of the guards whose law is not red without them; says of each how it went."""
    code, said = run(tree, sorted({guard.law for guard in guards}))
    if code:
        raise SystemExit(f"with all guards in place the laws are not green (pytest: {code}):\n{said}")
    missed = []
    for guard in guards:
        path, began_s = tree / guard.file, time.monotonic()
        text = path.read_text()
        path.write_text(without(guard, text))
        code, said = run(tree, [guard.law])
        path.write_text(text)
        is_noticed = code == RED
        took_s = time.monotonic() - began_s
        print(f"{'noticed' if is_noticed else 'NOT NOTICED'}  {guard.name:45} {took_s:6.1f} s  {guard.law}", flush=True)
        if not is_noticed:
            print(f"  pytest: {code}\n{said}", flush=True)
            missed.append(guard.name)
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of guards; all, if none is given")
    only = parser.parse_args().only
    guards = [guard for guard in GUARDS if not only or guard.name in only]
    with tempfile.TemporaryDirectory(prefix="guards-") as folder:
        tree = copy_of_the_tree(Path(folder))
        refuse_another_tree(tree)
        missed = unnoticed(guards, tree)
    print(
        f"{len(guards)} guards were removed one by one; {len(missed)} of them unnoticed{': ' if missed else ''}{', '.join(missed)}"
    )
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
