"""Every bound of the system, each with its reason. A bound that is reached is visible: an error, an event or a metric."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# -- leases and liveness ------------------------------------------------------------------------------------------------
NODE_LEASE_TTL_S: Final = 6
"""A node's etcd lease. Long enough that two lost keep-alives on a busy machine are no death."""
WORKER_LEASE_TTL_S: Final = 6
"""A worker's own etcd lease; same reasoning."""
LEADER_LEASE_TTL_S: Final = 5
"""The controller's leadership. A standby takes over within this plus one loop."""
LEASE_MARGIN_S: Final = 1.0
"""A holder stops acting on a lease this long before it can have expired."""
WITNESS_SILENCE_S: Final = 4.0
"""A node or worker without lease is dead only after it was silent by every other sign for this long."""
PROBE_AFTER_S: Final = 2.5
"""An agent that has not reported for this long is asked directly, so that the answer is there when its lease runs out."""
PROBE_EVERY_S: Final = 1.0
"""Between two probes of one silent node."""
PROBE_TIMEOUT_S: Final = 2.0
"""For one probe, connection included."""
ADOPT_GRACE_S: Final = 5.0
"""After an agent's first report, or after a new epoch was granted: time for it to name a worker before that counts as gone."""
PAUSE_CONFIRM_S: Final = 1.0
"""A stopped worker without lease is judged only after this, in case it is just waking up."""
STOP_CONFIRM_S: Final = 1.0
"""Between the order to stop and an agent's report that may confirm it: older reports may not know of the order."""
MASS_EXPIRY_SHARE: Final = 0.3
"""More than this share of leases (and at least MASS_EXPIRY_MIN) gone within MASS_EXPIRY_WINDOW_S is the store's trouble first."""
MASS_EXPIRY_MIN: Final = 3
MASS_EXPIRY_WINDOW_S: Final = 2.0
STORE_HOLD_S: Final = 10.0
"""How long membership is held after etcd returned, so that every agent can register again."""
OUTAGE_AFTER_S: Final = 1.5
"""etcd unreachable for this long is recorded as an outage; less is a hiccup."""
ETCD_CALL_TIMEOUT_S: Final = 3.0
"""One call to etcd; after it the outcome is unknown and the caller finds out."""
LEASE_START_TIMEOUT_S: Final = 30.0
"""A process that gets no lease within this does not start."""
ETCD_PROBE_S: Final = 1.0
"""A silent watch is checked with a read this often, so that a stopped etcd is noticed."""
ETCD_ANSWER_MAX_BYTES: Final = 64 * MIB
"""All keys below one prefix in one answer; some ten thousand runs."""
ETCD_RETRY_S: Final = (0.1, 0.2, 0.5, 1.0)
"""Waits between attempts to reach etcd again; the last one repeats."""
RELIST_EVERY_S: Final = 30.0
"""Watches are a hint to run sooner; the truth is listed again at least this often."""

# -- control loop -------------------------------------------------------------------------------------------------------
LOOP_MIN_PERIOD_S: Final = 0.1
"""Lower bound between two passes, so that a storm of events is no flood of passes."""
LOOP_MAX_PERIOD_S: Final = 1.0
"""Upper bound: every condition is looked at this often even when nothing wakes the loop."""
ENDED_RUN_SHOWN_S: Final = 60.0
"""How long the loop goes on looking at a run that is over, to record how its workers ended."""
PROGRESS_EVERY_S: Final = 1.0
"""How often workers and agents report."""
HANG_FLOOR_S: Final = 60.0
"""A phase without progress is no hang before this, whatever its history says."""
HANG_FACTOR: Final = 6.0
"""... nor before this many times the slowest healthy pass of the same phase."""
HANG_CAP_S: Final = 900.0
STARTUP_DEADLINE_S: Final = 300.0
"""A worker must leave `starting` within this; imports and model loading on a busy machine are slow."""

# -- restarts -----------------------------------------------------------------------------------------------------------
RESTART_WINDOW_S: Final = 600.0
RESTART_BUDGET: Final = 8
"""Restarts of one worker within RESTART_WINDOW_S before the run fails with the cause: a crash loop is never infinite."""
RESTART_BACKOFF_S: Final = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
IN_PLACE_RESTARTS: Final = 3
"""Failures of a worker on one node within RESTART_WINDOW_S before another node is preferred."""
USER_ERROR_BUDGET: Final = 2
"""The same user error this often ends the run with that error as its reason."""
STOP_GRACE_S: Final = 5.0
"""Between SIGTERM and SIGKILL of a worker's process group."""

# -- ledger -------------------------------------------------------------------------------------------------------------
GROUP_LEASE_S: Final = 60.0
"""A prompt group's lease; renewed with each report. A worker that is alive but silent loses its groups after this."""
GROUP_ATTEMPTS: Final = 20
"""Leases of one prompt group before it is dropped with the reason `poisoned`."""
LEASE_GROUPS_MAX: Final = 64
"""Groups given out in one `work/lease` call."""
REPORT_GROUPS_MAX: Final = 64
HELD_GROUPS_MAX: Final = 512
"""Finished groups that a rollout keeps until their step is committed."""
HELD_BYTES_MAX: Final = 256 * MIB
"""Payload bytes of those groups; a rollout that reaches either bound begins no new group."""
BATCHES_AHEAD: Final = 1
"""Batches a trainer may fetch beyond the step in progress, so that it works on while the controller is away."""

# -- database -----------------------------------------------------------------------------------------------------------
DATABASE_BUSY_S: Final = 10.0
"""How long a statement waits for another writer before the database counts as unreachable."""
DATABASE_CALL_S: Final = 3.0
"""To connect, and for the check whether the database lives."""
DATABASE_RETRIES: Final = 5
"""Runs of one transaction that PostgreSQL breaks off to end a deadlock."""
SPANS_KEPT: Final = 20_000
"""Spans of one run's timeline; older ones are pruned."""
APPLIES_KEPT: Final = 5_000
"""Applied versions of one run that are remembered, over all rollouts."""

# -- bytes --------------------------------------------------------------------------------------------------------------
CHUNK_TARGET_BYTES: Final = 4 * MIB
"""Uncompressed elements of a tensor range per chunk, in bytes of the dtype: the unit of repair."""
CHUNK_MAX_BYTES: Final = 64 * MIB
"""No chunk is larger; a reader refuses to allocate more."""
MANIFEST_MAX_BYTES: Final = 64 * MIB
PAYLOAD_MAX_BYTES: Final = 16 * MIB
"""One prompt group's tokens, log-probs and version spans."""
BODY_MAX_BYTES: Final = 8 * MIB
"""One request to the controller."""
FRAME_MAX_BYTES: Final = 1 * MIB
"""One control frame between chunk client and server."""
TRANSFER_STREAMS: Final = 4
"""Parallel TCP connections of one chunk client."""
TRANSFER_RETRIES: Final = 5
"""Attempts for one chunk over all sources before the transfer fails."""
TRANSFER_DEADLINE_S: Final = 120.0
"""No new attempt for a chunk begins after this; one that advances is not cut off."""
CHUNK_DISK_THREADS: Final = 8
"""Reads and writes of one chunk server under way at the same time; a dead disk stops these and nothing else."""
CHUNK_PUTS_MAX: Final = 8
"""Chunks that one chunk server receives at the same time: each is held in memory until its digest is known."""
CONNECTIONS_MAX: Final = 256
"""Open connections of one chunk server."""
IDLE_TIMEOUT_S: Final = 120.0
"""A connection to a chunk server without a request for this long is closed."""
CONNECT_TIMEOUT_S: Final = 3.0
IO_TIMEOUT_S: Final = 20.0

# -- logs, events, pages ------------------------------------------------------------------------------------------------
WORKER_LOG_BYTES: Final = 4 * MIB
"""Size of one worker's log file before it is rotated; one older file is kept."""
LOG_TAIL_BYTES: Final = 256 * KIB
HOUSEKEEPING_EVERY_S: Final = 60.0
"""Between two prunings of the database's histories."""
EVENTS_KEPT: Final = 100_000
"""Events per database; older ones are pruned."""
PAGE_DEFAULT: Final = 50
PAGE_MAX: Final = 500
SSE_QUEUE: Final = 1_000
"""Events buffered for one slow SSE reader before it is disconnected and must resume by id."""

# -- checkpoints --------------------------------------------------------------------------------------------------------
SNAPSHOTS_KEPT: Final = 2
"""Snapshots that retention keeps; the chain needed to replay from the older of them is kept too."""
ANCHOR_CHAIN_RATIO: Final = 1.0
"""A new anchor is written when the deltas since the last one outweigh this times a full copy."""
SNAPSHOT_VERSIONS_MAX: Final = 64
"""Versions between two snapshots under `snapshot_every = "auto"` at most: bounds the replay whatever was measured."""
EXPECTED_FAILURE_EVERY_S: Final = 3600.0
"""Time between two failures of a trainer that the automatic snapshot interval is made for."""

# -- trainer ------------------------------------------------------------------------------------------------------------
RANKS_TIMEOUT_S: Final = 1800.0
"""A rank waits this long for the others in one exchange; dead peers are noticed at once, by their connections."""
RANKS_IDLE_S: Final = 1.0
"""While it waits for a batch, rank 0 tells the other ranks this often that it still does."""
PUBLISH_WAIT_MAX_S: Final = 1500.0
"""How long a finished step waits for etcd or for room in the store; below RANKS_TIMEOUT_S, as the other ranks wait with it."""
PUBLISH_RETRY_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Waits between two attempts to publish; the last one repeats."""
NONFINITE_STEPS_MAX: Final = 3
"""Steps in a row whose loss or gradient is not finite before the run fails: the weights are beyond repair by skipping."""

# -- API ----------------------------------------------------------------------------------------------------------------
SSE_HEARTBEAT_S: Final = 10.0
"""Silence on an event stream after which a comment is sent, so that proxies and readers know that it lives."""
SSE_READERS_MAX: Final = 200
"""Event streams open at the same time; the next one is answered with 429."""
SESSION_TTL_S: Final = 12 * 3600
"""A browser session; after it the page asks for the token again."""
LOGIN_LINK_TTL_S: Final = 600
"""A login link printed by the CLI; usable once within this time."""
LOGIN_LINKS_KEPT: Final = 1_000
"""Used login links remembered; when there are more unexpired ones than this, further links are refused."""
METRIC_RUNS_MAX: Final = 50
"""Runs that /metrics shows: the newest ones. Keeps the label `run` bounded."""
METRIC_POINTS_MAX: Final = 20_000
"""Versions that one answer of `/metrics` of a run or of its timeline covers; the rest by `after_step` or `since`."""
TIMELINE_SPANS_MAX: Final = 5_000
"""Spans in one answer of the timeline; the newest ones."""
HEADER_MAX_CHARS: Final = 200
"""Idempotency-Key and X-Request-Id; longer ones are refused or replaced."""
IDEMPOTENCY_KEPT_S: Final = 24 * 3600
"""How long the answer to an Idempotency-Key is kept."""
API_SHUTDOWN_S: Final = 1
"""Seconds that open requests get after SIGTERM before their connections are closed."""
CONTROLLER_STOP_S: Final = 2.0
"""The control loop ends and resigns its leadership within this, else its lease has to expire."""
API_TIMEOUT_S: Final = 15.0
"""One call of the CLI to the controller."""
READY_CHECK_S: Final = 2.0
"""Each check of /readyz."""
AGENT_CALL_TIMEOUT_S: Final = 5.0
"""One question of the API to a node's agent, such as the end of a log."""

# -- node agent ---------------------------------------------------------------------------------------------------------
AGENT_POLL_S: Final = 0.25
"""How often an agent looks at its processes; an exit of its own child wakes it at once."""
STOP_POLL_S: Final = 0.1
"""The same while a worker is being stopped."""
KILL_WAIT_S: Final = 10.0
"""A process that outlives SIGKILL this long sits in the kernel (dead disk, driver): the node takes no new workers."""
OWNERS_FRESH_S: Final = 10.0
"""An agent acts on etcd's owners only when they were proven current within this; above the watch's own proof interval."""
RANK_SKEW_S: Final = 120.0
"""After one rank of a worker finished well, the others finish within this or are ended."""
EXIT_TAIL_BYTES: Final = 4 * KIB
"""End of a worker's output that goes along with the report of its exit."""
EXITS_KEPT: Final = 256
"""Exits that an agent keeps for a controller that is away; the oldest leave the report first, never the disk."""
WORKER_DIRS_KEPT: Final = 8
"""Folders of ended epochs of one worker (its output, how it ended) that a node keeps."""
EPOCH_FOLDERS_MAX: Final = 256
"""Folders of workers' epochs on one node, over all runs."""
AGENT_REPORT_TIMEOUT_S: Final = 5.0
AGENT_REPORT_BACKOFF_S: Final = (0.5, 1.0, 2.0)
"""Waits after failed reports in a row; the last one repeats."""
SELF_FENCE_WARN_S: Final = 60.0
"""An agent that reaches neither etcd nor the controller for this long says so. Its policy is `keep`: workers go on."""
CACHE_BYTES: Final = 16 * 1024 * MIB
"""Chunks that a node caches beside the run store; the oldest leave when it is exceeded."""
CACHE_PRUNE_EVERY_S: Final = 30.0
