"""Tables that say what counts and why: validations, quarantine, decisions and the ledger."""

import pyarrow as pa

from schemas.tables.table import TIMESTAMP, Table, optional, required

LEDGER_KINDS = (
    "run_created",
    "lease_taken",
    "lease_renewed",
    "cycle_opened",
    "rollouts_recorded",
    "batch_admitted",
    "batch_accepted",
    "batch_refused",
    "batch_trained",
    "version_published",
    "evaluated",
    "decision_adopted",
    "rolled_back",
    "cycle_closed",
)

VALIDATIONS = Table(
    name="validations",
    description="The result of every rule on every profile it judged.",
    columns=(
        required(
            "gate",
            pa.int16(),
            "0 at attach, 1 before admission, 2 before the backward.",
        ),
        required("rule", pa.string(), "Rule id."),
        required("severity", pa.string(), "row, group, batch or warning."),
        required("scope", pa.string(), "What was judged: a recorded window or an admission."),
        optional(
            "observed",
            pa.float64(),
            "Largest value of the rule's counter, or a drift rule's statistic; NULL where there "
            "was nothing to count.",
        ),
        required("expected", pa.string(), "Range the rule allows."),
        required("ok", pa.bool_(), "Whether it held."),
        required("num_failed", pa.int64(), "Profile rows outside the range."),
        required("judged_at", TIMESTAMP, "When."),
        optional(
            "waived_by",
            pa.int64(),
            "seq of the decision_adopted row whose waiver keeps this result from counting; NULL if "
            "none does.",
        ),
    ),
    sort_by=("gate", "rule"),
    dictionary=("rule", "severity", "scope"),
)

QUARANTINE = Table(
    name="quarantine",
    description="Trajectories that will not be trained, and why.",
    columns=(
        required("trajectory_id", pa.string(), "The trajectory."),
        required("group_id", pa.int64(), "Its group."),
        required(
            "rule", pa.string(), "Rule that failed, or failed, group, refused, stale or surplus."
        ),
        optional(
            "observed", pa.float64(), "The rule's counter for this trajectory; NULL for a drop."
        ),
        required(
            "action",
            pa.string(),
            "quarantine (a fault), refuse (its batch was) or drop (nothing wrong).",
        ),
        required("reason", pa.string(), "One sentence for people."),
    ),
    sort_by=("trajectory_id", "rule"),
    dictionary=("rule", "action", "reason"),
)

DECISIONS = Table(
    name="decisions",
    description="A reviewer's word on a refusal: one row for an approval, one a rule for a waiver. "
    "It counts once the controller adopts it.",
    columns=(
        required("decision", pa.string(), "approve (it stays refused) or waive (it may be used)."),
        required("refusal", pa.int64(), "seq of the batch_refused row decided on."),
        optional(
            "admission", pa.int64(), "Admission that was refused; NULL for a refusal at gate 1."
        ),
        optional("rule", pa.string(), "Rule waived; NULL for an approval."),
        required("reviewer", pa.string(), "Who decided."),
        required("reason", pa.string(), "Why."),
        required("decided_at", TIMESTAMP, "When."),
    ),
    sort_by=("decided_at", "rule"),
)

MAINTENANCE = Table(
    name="maintenance",
    description="What maintenance took out of a table or of the store for good, recorded before it "
    "goes.",
    columns=(
        required(
            "action",
            pa.string(),
            "expire (rows that counted or checkpoints of trained batches, beyond the run's policy) "
            "or drop (a write or a checkpoint that no ledger row named within the grace period).",
        ),
        required(
            "table_name",
            pa.string(),
            "Table that lost the rows; its partition is `cycle`. `checkpoints` where folders of "
            "the store went.",
        ),
        required("policy", pa.string(), "Key of the run file and its value that asked for it."),
        required("cutoff", TIMESTAMP, "Everything that went is older than this."),
        required("num_files", pa.int32(), "Files taken out."),
        required("num_rows", pa.int64(), "Rows in them."),
        required("num_bytes", pa.int64(), "Their size."),
        required(
            "expired_write_ids",
            pa.list_(pa.string()),
            "Writes that the rows were of: what the ledger names and the table no longer holds is "
            "expired if it stands here, else lost.",
        ),
        required("recorded_at", TIMESTAMP, "When."),
        optional(
            "checkpoints",
            pa.list_(pa.string()),
            "Paths of the checkpoints that went, as the ledger has them; NULL where rows went.",
        ),
    ),
    sort_by=("table_name", "action", "recorded_at"),
    dictionary=("action", "table_name", "policy"),
    checks={"action_known": "action IS NULL OR action IN ('expire', 'drop')"},
)

LEDGER = Table(
    name="ledger",
    description="The one list of what happened to a run. Only the holder of the lease appends.",
    columns=(
        required("seq", pa.int64(), "Position in the run's ledger, from 0, without gaps."),
        required("kind", pa.string(), "What happened: " + ", ".join(LEDGER_KINDS) + "."),
        optional("batch", pa.int64(), "Batch it concerns; NULL if none."),
        optional("version", pa.int64(), "Weight version it concerns; NULL if none."),
        required(
            "lease",
            pa.int64(),
            "Lease under which it was written: the seq of a lease_taken row, its own for that row, "
            "0 for run_created.",
        ),
        required("committed_at", TIMESTAMP, "Clock of the controller."),
        required("write_ids", pa.list_(pa.string()), "Writes this row makes visible."),
        optional("num_trajectories", pa.int64(), "Trajectories it concerns; NULL if none."),
        optional(
            "trajectories_hash",
            pa.string(),
            "BLAKE3 over their ids in order, one a line; NULL if none.",
        ),
        optional(
            "checkpoint",
            pa.string(),
            "Checkpoint path relative to the run; NULL but for batch_trained.",
        ),
        optional(
            "root_hash",
            pa.string(),
            "Root hash of the published values after the batch or of the version; NULL if none.",
        ),
        required("details", pa.string(), "What else a reader needs, as JSON."),
    ),
    sort_by=("seq",),
    dictionary=("kind",),
    checks={"seq_not_negative": "seq IS NULL OR seq >= 0"},
)
