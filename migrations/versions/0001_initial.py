"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.Column("run_id", sa.String(255), nullable=True),
        sa.Column("subject", sa.String(255), nullable=False),
        sa.Column("kind", sa.String(255), nullable=False),
        sa.Column("severity", sa.String(255), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_run_id"), "events", ["run_id"], unique=False)
    op.create_table(
        "idempotency_keys",
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("request_digest", sa.String(255), nullable=False),
        sa.Column("status", BIG, nullable=False),
        sa.Column("body", DOCUMENT, nullable=False),
        sa.Column("headers", DOCUMENT, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index(op.f("ix_idempotency_keys_created_at"), "idempotency_keys", ["created_at"], unique=False)
    op.create_table(
        "leadership",
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("epoch", BIG, nullable=False),
        sa.Column("holder", sa.String(255), nullable=False),
        sa.Column("since", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leadership")),
    )
    op.create_table(
        "nodes",
        sa.Column("id", sa.String(255), nullable=False),
        sa.Column("incarnation", sa.String(255), nullable=False),
        sa.Column("address", sa.String(255), nullable=False),
        sa.Column("region", sa.String(255), nullable=False),
        sa.Column("state", sa.String(255), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("cordoned", sa.Boolean(), nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("resources", DOCUMENT, nullable=False),
        sa.Column("usage", DOCUMENT, nullable=False),
        sa.Column("started_at", sa.String(255), nullable=False),
        sa.Column("joined_at", MOMENT, nullable=True),
        sa.Column("last_report_at", MOMENT, nullable=True),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(255), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("spec", DOCUMENT, nullable=False),
        sa.Column("desired_state", sa.String(255), nullable=False),
        sa.Column("state", sa.String(255), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("generation", BIG, nullable=False),
        sa.Column("observed_generation", BIG, nullable=False),
        sa.Column("head_version", BIG, nullable=False),
        sa.Column("head_manifest", sa.String(255), nullable=False),
        sa.Column("mirrored_version", BIG, nullable=False),
        sa.Column("group_size", BIG, nullable=False),
        sa.Column("groups_per_step", BIG, nullable=False),
        sa.Column("max_versions", BIG, nullable=False),
        sa.Column("max_steps", BIG, nullable=False),
        sa.Column("next_index", BIG, nullable=False),
        sa.Column("late_results", BIG, nullable=False),
        sa.Column("failed_groups", BIG, nullable=False),
        sa.Column("recoveries", BIG, nullable=False),
        sa.Column("running_s", sa.Double(), nullable=False),
        sa.Column("unavailable_s", sa.Double(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.Column("started_at", MOMENT, nullable=True),
        sa.Column("finished_at", MOMENT, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    op.create_index(op.f("ix_runs_name"), "runs", ["name"], unique=False)
    op.create_index(op.f("ix_runs_state"), "runs", ["state"], unique=False)
    op.create_table(
        "applies",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(255), nullable=False),
        sa.Column("worker", sa.String(255), nullable=False),
        sa.Column("version", BIG, nullable=False),
        sa.Column("applied_at", MOMENT, nullable=False),
        sa.Column("apply_ms", sa.Double(), nullable=True),
        sa.Column("pause_ms", sa.Double(), nullable=True),
        sa.Column("fetch_ms", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_applies_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_applies")),
    )
    op.create_index("ix_applies_run_version", "applies", ["run_id", "version"], unique=False)
    op.create_table(
        "batches",
        sa.Column("run_id", sa.String(255), nullable=False),
        sa.Column("step", BIG, nullable=False),
        sa.Column("epoch", BIG, nullable=False),
        sa.Column("group_ids", DOCUMENT, nullable=False),
        sa.Column("committed", sa.Boolean(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_batches_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("pk_batches")),
    )
    op.create_table(
        "incidents",
        sa.Column("id", sa.String(255), nullable=False),
        sa.Column("run_id", sa.String(255), nullable=True),
        sa.Column("kind", sa.String(255), nullable=False),
        sa.Column("subject", sa.String(255), nullable=False),
        sa.Column("worker", sa.String(255), nullable=False),
        sa.Column("node_id", sa.String(255), nullable=False),
        sa.Column("epoch", BIG, nullable=False),
        sa.Column("severity", sa.String(255), nullable=False),
        sa.Column("state", sa.String(255), nullable=False),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("failed_at", MOMENT, nullable=True),
        sa.Column("detected_at", MOMENT, nullable=False),
        sa.Column("decided_at", MOMENT, nullable=True),
        sa.Column("recovered_at", MOMENT, nullable=True),
        sa.Column("decisions", DOCUMENT, nullable=False),
        sa.Column("cost", DOCUMENT, nullable=False),
        sa.Column("details", DOCUMENT, nullable=False),
        sa.Column("log_tail", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_incidents_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_incidents")),
    )
    op.create_index(op.f("ix_incidents_run_id"), "incidents", ["run_id"], unique=False)
    op.create_index(op.f("ix_incidents_state"), "incidents", ["state"], unique=False)
    op.create_table(
        "prompt_groups",
        sa.Column("id", sa.String(255), nullable=False),
        sa.Column("run_id", sa.String(255), nullable=False),
        sa.Column("index", BIG, nullable=False),
        sa.Column("state", sa.String(255), nullable=False),
        sa.Column("attempt", BIG, nullable=False),
        sa.Column("worker", sa.String(255), nullable=False),
        sa.Column("worker_epoch", BIG, nullable=False),
        sa.Column("lease_deadline", MOMENT, nullable=True),
        sa.Column("consume_by", BIG, nullable=True),
        sa.Column("partial", sa.String(255), nullable=False),
        sa.Column("partial_tokens", BIG, nullable=False),
        sa.Column("partial_min_version", BIG, nullable=False),
        sa.Column("payload", sa.String(255), nullable=False),
        sa.Column("payload_bytes", BIG, nullable=False),
        sa.Column("tokens", BIG, nullable=False),
        sa.Column("min_version", BIG, nullable=False),
        sa.Column("max_version", BIG, nullable=False),
        sa.Column("step", BIG, nullable=True),
        sa.Column("consumed_count", BIG, nullable=False),
        sa.Column("from_log", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_prompt_groups_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prompt_groups")),
        sa.UniqueConstraint("run_id", "index", name=op.f("uq_prompt_groups_run_id_index")),
    )
    op.create_index("ix_prompt_groups_run_state", "prompt_groups", ["run_id", "state"], unique=False)
    op.create_index("ix_prompt_groups_run_step", "prompt_groups", ["run_id", "step"], unique=False)
    op.create_table(
        "restarts",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(255), nullable=False),
        sa.Column("worker", sa.String(255), nullable=False),
        sa.Column("node_id", sa.String(255), nullable=False),
        sa.Column("epoch", BIG, nullable=False),
        sa.Column("kind", sa.String(255), nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.Column("charged", sa.Boolean(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_restarts_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_restarts")),
    )
    op.create_index("ix_restarts_run_worker_at", "restarts", ["run_id", "worker", "at"], unique=False)
    op.create_table(
        "versions",
        sa.Column("run_id", sa.String(255), nullable=False),
        sa.Column("version", BIG, nullable=False),
        sa.Column("manifest", sa.String(255), nullable=False),
        sa.Column("parent", sa.String(255), nullable=False),
        sa.Column("kind", sa.String(255), nullable=False),
        sa.Column("epoch", BIG, nullable=False),
        sa.Column("payload_bytes", BIG, nullable=False),
        sa.Column("full_bytes", BIG, nullable=False),
        sa.Column("changed", BIG, nullable=False),
        sa.Column("total", BIG, nullable=False),
        sa.Column("anchor", sa.String(255), nullable=False),
        sa.Column("snapshot", sa.String(255), nullable=False),
        sa.Column("state_digest", sa.String(255), nullable=False),
        sa.Column("replayed", sa.Boolean(), nullable=False),
        sa.Column("step_seconds", sa.Double(), nullable=True),
        sa.Column("metrics", DOCUMENT, nullable=False),
        sa.Column("committed_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_versions_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "version", name=op.f("pk_versions")),
    )
    op.create_table(
        "worker_spans",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(255), nullable=False),
        sa.Column("worker", sa.String(255), nullable=False),
        sa.Column("role", sa.String(255), nullable=False),
        sa.Column("node_id", sa.String(255), nullable=False),
        sa.Column("epoch", BIG, nullable=False),
        sa.Column("state", sa.String(255), nullable=False),
        sa.Column("phase", sa.String(255), nullable=False),
        sa.Column("since", MOMENT, nullable=False),
        sa.Column("until", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_worker_spans_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_worker_spans")),
    )
    op.create_index("ix_worker_spans_run_worker_since", "worker_spans", ["run_id", "worker", "since"], unique=False)
    op.create_index(op.f("ix_worker_spans_until"), "worker_spans", ["until"], unique=False)
    op.create_table(
        "workers",
        sa.Column("run_id", sa.String(255), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("role", sa.String(255), nullable=False),
        sa.Column("node_id", sa.String(255), nullable=False),
        sa.Column("epoch", BIG, nullable=False),
        sa.Column("start", BIG, nullable=False),
        sa.Column("state", sa.String(255), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("pids", DOCUMENT, nullable=False),
        sa.Column("phase", sa.String(255), nullable=False),
        sa.Column("phase_since", MOMENT, nullable=True),
        sa.Column("policy_version", BIG, nullable=False),
        sa.Column("counters", DOCUMENT, nullable=False),
        sa.Column("gauges", DOCUMENT, nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("last_progress_at", MOMENT, nullable=True),
        sa.Column("exit", DOCUMENT, nullable=True),
        sa.Column("started_at", MOMENT, nullable=True),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_workers_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "name", name=op.f("pk_workers")),
    )
    op.create_table(
        "trajectories",
        sa.Column("group_id", sa.String(255), nullable=False),
        sa.Column("sample", BIG, nullable=False),
        sa.Column("run_id", sa.String(255), nullable=False),
        sa.Column("tokens", BIG, nullable=False),
        sa.Column("reward", sa.Double(), nullable=False),
        sa.Column("min_version", BIG, nullable=False),
        sa.Column("max_version", BIG, nullable=False),
        sa.Column("finish_reason", sa.String(255), nullable=False),
        sa.ForeignKeyConstraint(
            ["group_id"], ["prompt_groups.id"], name=op.f("fk_trajectories_group_id_prompt_groups"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_trajectories_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("group_id", "sample", name=op.f("pk_trajectories")),
    )
    op.create_index("ix_trajectories_run", "trajectories", ["run_id"], unique=False)


def downgrade() -> None:
    op.drop_index("ix_trajectories_run", table_name="trajectories")
    op.drop_table("trajectories")
    op.drop_table("workers")
    op.drop_index(op.f("ix_worker_spans_until"), table_name="worker_spans")
    op.drop_index("ix_worker_spans_run_worker_since", table_name="worker_spans")
    op.drop_table("worker_spans")
    op.drop_table("versions")
    op.drop_index("ix_restarts_run_worker_at", table_name="restarts")
    op.drop_table("restarts")
    op.drop_index("ix_prompt_groups_run_step", table_name="prompt_groups")
    op.drop_index("ix_prompt_groups_run_state", table_name="prompt_groups")
    op.drop_table("prompt_groups")
    op.drop_index(op.f("ix_incidents_state"), table_name="incidents")
    op.drop_index(op.f("ix_incidents_run_id"), table_name="incidents")
    op.drop_table("incidents")
    op.drop_table("batches")
    op.drop_index("ix_applies_run_version", table_name="applies")
    op.drop_table("applies")
    op.drop_index(op.f("ix_runs_state"), table_name="runs")
    op.drop_index(op.f("ix_runs_name"), table_name="runs")
    op.drop_table("runs")
    op.drop_table("nodes")
    op.drop_table("leadership")
    op.drop_index(op.f("ix_idempotency_keys_created_at"), table_name="idempotency_keys")
    op.drop_table("idempotency_keys")
    op.drop_index(op.f("ix_events_run_id"), table_name="events")
    op.drop_table("events")
