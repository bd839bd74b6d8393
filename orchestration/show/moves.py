"""Output of `copy`, `move` and `verify`: plans, results and findings."""

from __future__ import annotations

from typing import Any

from state_runtime.maintenance.move.execute import MoveResult
from state_runtime.maintenance.move.plan import MovePlan
from state_runtime.maintenance.verify.report import VerifyReport
from stillstate.orchestration.text import bytes_text, count_text, duration_text

__all__ = ["move_json", "plan_text", "report_json", "result_text", "show_report"]

_FINDINGS_MAX = 200


def plan_text(plan: MovePlan) -> str:
    """Return one line: source, target, and method."""
    if plan.outcome is not None:
        return f"end the {plan.mode} of {plan.source_url} to {plan.target_url}, which is complete"
    what = {
        "root": f"job {plan.job.name} with {count_text(len(plan.snapshots))} snapshots "
        f"and {count_text(len(plan.savepoints))} savepoints",
        "snapshot": f"snapshot {plan.snapshot_id} of {plan.job.name}",
        "savepoint": f"the savepoint of {plan.job.name}",
    }[plan.what]
    how = "copied by the store itself" if plan.inside else "through this machine"
    resumed = ", continuing the interrupted one" if plan.resumes is not None else ""
    left = f"; {', '.join(plan.left)} not complete and left out" if plan.left else ""
    return (
        f"{plan.mode} {what} from {plan.source_url} to {plan.target_url}: {count_text(plan.objects)} objects, "
        f"{bytes_text(plan.bytes)}, {how}{resumed}{left}"
    )


def result_text(result: MoveResult) -> str:
    """Return the text of the result."""
    plan = result.plan
    if plan.outcome is not None:
        done = "nothing was done" if plan.resumes is None else "the remaining steps are done"
        return f"{plan.target_url} was complete; {done}"
    done = "copied" if plan.mode == "copy" else "moved"
    kept = result.objects - result.objects_copied
    lines = [
        f"{plan.job.name}: {done} to {plan.target_url} in {duration_text(result.seconds)}: "
        f"{count_text(len(result.snapshots))} snapshots, {count_text(len(result.savepoints))} savepoints, "
        f"{count_text(result.objects_copied)} objects with {bytes_text(result.bytes_copied)}"
        + (f"; {count_text(kept)} were there already" if kept else "")
    ]
    if result.expired:
        lines.append(f"expired in the source meanwhile, and left out: {', '.join(map(str, result.expired))}")
    if result.left:
        lines.append(f"not of Stillstate, and still in {plan.source_url}: {', '.join(result.left[:10])}")
    return "\n".join(lines)


def move_json(plan: MovePlan, result: MoveResult | None) -> dict[str, Any]:
    """Return plan and result for `--json`; `done` only after the plan was executed."""
    shown: dict[str, Any] = {
        "mode": plan.mode,
        "what": plan.what,
        "job": plan.job.name,
        "source": plan.source_url,
        "target": plan.target_url,
        "snapshots": list(plan.snapshots),
        "savepoints": list(plan.savepoints),
        "left": list(plan.left),
        "objects": plan.objects,
        "bytes": plan.bytes,
        "inside_store": plan.inside,
        "resumes": plan.resumes is not None,
        "complete_before": plan.outcome is not None,
    }
    if result is not None:
        shown["done"] = {
            "snapshots": list(result.snapshots),
            "savepoints": list(result.savepoints),
            "expired": list(result.expired),
            "objects": result.objects,
            "bytes": result.bytes,
            "objects_copied": result.objects_copied,
            "bytes_copied": result.bytes_copied,
            "left_at_source": list(result.left),
            "seconds": round(result.seconds, 3),
        }
    return shown


def report_json(job: str, report: VerifyReport) -> dict[str, Any]:
    """Return the report for `--json`, with every finding."""
    return {
        "job": job,
        "place": report.url,
        "level": report.level,
        "ok": report.exit_code == 0,
        "complete": report.complete,
        "snapshots": list(report.snapshots),
        "savepoints": report.savepoints,
        "objects": report.objects,
        "bytes": report.bytes,
        "objects_read": report.objects_read,
        "bytes_read": report.bytes_read,
        "rows": report.rows,
        "findings": [finding.to_json_dict() for finding in report.findings],
        "findings_left_out": report.findings_left_out,
        "shared_by_link": [
            {
                "owner": f"savepoint {owner}" if owner else "job",
                "files": shared.files,
                "bytes": shared.bytes,
                "with": list(shared.owners),
                "elsewhere": shared.elsewhere,
            }
            for owner, shared in report.shared
        ],
        "seconds": round(report.seconds, 3),
    }


def show_report(job: str, report: VerifyReport) -> None:
    """Print a line per finding, then the sum."""
    for finding in report.findings[:_FINDINGS_MAX]:
        ids = ", ".join(map(str, finding.snapshot_ids[:5])) + (" …" if len(finding.snapshot_ids) > 5 else "")
        of = f", snapshot {ids}" if ids else ""
        print(f"{finding.kind}: {finding.path} ({finding.whose}{of}): {finding.detail}")
    left = len(report.findings) - _FINDINGS_MAX
    if left > 0 or report.findings_left_out:
        print(f"and {count_text(max(left, 0) + report.findings_left_out)} more; --json lists them")
    if not report.complete:
        print("the store does not answer any more: what follows was not looked at; repeat it later")
    for owner, shared in report.shared:
        print(
            f"note: {count_text(shared.files)} files ({bytes_text(shared.bytes)}) of "
            f"{f'savepoint {owner}' if owner else 'the job'} are hard links of files of {shared}: a damaged byte is "
            "damaged in all of them"
        )
    read = f", {count_text(report.objects_read)} read ({bytes_text(report.bytes_read)})" if report.objects_read else ""
    rows = f", {count_text(report.rows)} rows decoded" if report.level == "full" else ""
    verdict = "nothing wrong" if report.exit_code == 0 else f"{count_text(len(report.findings))} findings"
    print(
        f"{job}: {verdict}: {count_text(len(report.snapshots))} snapshots, {count_text(report.savepoints)} savepoints, "
        f"{count_text(report.objects)} objects ({bytes_text(report.bytes)}){read}{rows}, in "
        f"{duration_text(report.seconds)}"
    )
