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
"""Fewer nodes than this are never taken for the store's trouble."""
MASS_EXPIRY_WINDOW_S: Final = 2.0
"""Leases that go one after another over longer than this went for reasons of their own."""
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
OWN_LEASES_KEPT: Final = 32
"""Leases whose put may have taken effect without our knowing; older ones have expired long ago."""
ETCD_START_TIMEOUT_S: Final = 20.0
"""A child etcd that does not answer within this after its start has failed."""
ETCD_STOP_TIMEOUT_S: Final = 5.0
"""A child etcd that is asked to end and has not within this is killed."""

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
"""... and at the latest after this: a phase that was slow once may not hide a hang for ever."""
STARTUP_DEADLINE_S: Final = 300.0
"""A worker must leave `starting` within this; imports and model loading on a busy machine are slow."""
VERSIONS_PER_PASS_MAX: Final = 256
"""Versions recorded before the next look at the term: a long backlog must not outlive a deposed leader."""

# -- restarts -----------------------------------------------------------------------------------------------------------
RESTART_WINDOW_S: Final = 600.0
"""Failures longer ago than this are forgotten: a run of weeks may fail now and then."""
RESTART_BUDGET: Final = 8
"""Restarts of one worker within RESTART_WINDOW_S before the run fails with the cause: a crash loop is never infinite."""
RESTART_BACKOFF_S: Final = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
"""Waits before the first, second, ... restart within the window; the last one repeats."""
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
ENVIRONMENT_FAILURES_MAX: Final = 8
"""Prompt groups in a row that an environment may fail. Then, if it never worked, it is an error on the user's side; if it
did, an outage, which is told and during which prompts are tried less often."""
ENVIRONMENT_RETRY_S: Final = 10.0
"""Between two rounds of prompts while an environment that has worked before is away."""
INCIDENT_REPEAT_S: Final = 60.0
"""Between two incidents of one worker about the same chunk, which may be rotten at all its sources."""
INCIDENT_SUBJECTS_MAX: Final = 256
"""Chunks of which a worker remembers when it last told of them."""
LEASE_GROUPS_MAX: Final = 64
"""Groups given out in one `work/lease` call."""
REPORT_GROUPS_MAX: Final = 64
"""Groups named in one report, which is one transaction under the run's lock; the rest go with the next."""
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
"""A manifest is held in memory whole; this is enough for millions of chunks."""
LAYOUT_ELEMENTS_MAX: Final = 2**56
"""Positions stay far inside int64, whatever a hostile layout says."""
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
"""To open a connection; a machine that is gone does not refuse, it stays silent."""
IO_TIMEOUT_S: Final = 20.0
"""For one piece of a transfer to move; after it the connection counts as broken."""
ANCHOR_BATCH_BYTES: Final = 16 * CHUNK_TARGET_BYTES
"""Chunks in memory at once while an anchor or snapshot is read."""
CHUNK_SPANS_MAX: Final = 65_536
"""Tensor ranges in one chunk: bounds the span table, which is larger than the elements of scalar tensors."""
CHUNK_RAW_MAX: Final = 2 * CHUNK_MAX_BYTES
"""A sparse chunk of 8-byte elements has streams a little larger than its elements; none is twice as large."""
TRANSFER_RETRY_PAUSE_S: Final = 0.2
"""Before all sources are asked again, times the number of rounds so far."""
SHUN_S: Final = 10.0
"""A source that did not answer is asked last for this long, so that not every chunk waits for the same dead node."""
PIECE_BYTES: Final = 256 * 1024
"""Received or sent at a time; the timeout holds for each, so that a slow line is no broken one."""
SLICE_BYTES: Final = 1024 * 1024
"""Read and sent at a time, so that one transfer holds little memory."""

# -- logs, events, pages ------------------------------------------------------------------------------------------------
WORKER_LOG_BYTES: Final = 4 * MIB
"""Size of one worker's log file before it is rotated; one older file is kept."""
LOG_TAIL_BYTES: Final = 256 * KIB
"""End of a worker's output that is read for a person in one answer."""
HOUSEKEEPING_EVERY_S: Final = 60.0
"""Between two prunings of the database's histories."""
EVENTS_KEPT: Final = 100_000
"""Events per database; older ones are pruned."""
PAGE_DEFAULT: Final = 50
"""Entries of a list in one answer when the caller does not say."""
PAGE_MAX: Final = 500
"""Entries of a list in one answer at most; the rest follows by cursor."""
SSE_QUEUE: Final = 1_000
"""Events buffered for one slow SSE reader before it is disconnected and must resume by id."""

# -- checkpoints --------------------------------------------------------------------------------------------------------
KEPT_CHUNKS_BYTES: Final = 256 * MIB
"""Chunks that a trainer rank keeps in memory after writing them, to write them again if the disk damages them."""
ORPHANS_KEPT_S: Final = 24 * 3600.0
"""A chunk that nothing names is deleted when it was found so twice, this far apart."""
HEAL_EVERY_S: Final = 10.0
"""While a trainer waits for a batch, it looks this often whether its newest chunks are whole in the store."""
SNAPSHOTS_KEPT: Final = 2
"""Snapshots that retention keeps; the chain needed to replay from the older of them is kept too."""
STALE_TEMPORARY_S: Final = 24 * 3600
"""A temporary file of a store that is older was left by a process that was killed while it wrote; the next one deletes it."""
ANCHOR_CHAIN_RATIO: Final = 1.0
"""A new anchor is written when the deltas since the last one outweigh this times a full copy."""
SNAPSHOT_VERSIONS_MAX: Final = 64
"""Versions between two snapshots under `snapshot_every = "auto"` at most: bounds the replay whatever was measured."""
EXPECTED_FAILURE_EVERY_S: Final = 600.0
"""Time between two failures of a trainer that the automatic snapshot interval is made for."""

# -- workers -----------------------------------------------------------------------------------------------------------
WORK_CALL_TIMEOUT_S: Final = 10.0
"""One request; the controller answers from its database, and a busy machine may take seconds."""
NOTE_CHARS: Final = 400
"""Of a worker's note that are sent with its progress; a note is one sentence."""
INCIDENTS_HELD: Final = 100
"""Incidents kept while the controller is away; older ones are only in the log."""

# -- rollouts ----------------------------------------------------------------------------------------------------------
PATCHES_QUEUED: Final = 8
"""Patches prepared beyond what the engine has taken; the follower waits beyond that."""
VERSION_REPAIRS_MAX: Final = 2
"""Fetches of a version that does not verify, before the host copy is built anew from an anchor."""
HEAD_WAIT_S: Final = 0.5
"""One wait of a follower for a new head; then it looks whether it shall end."""
FOLLOW_RETRY_S: Final = 1.0
"""Pause after a source was missing or silent. Generation goes on with the version held."""
PUT_ATTEMPTS: Final = 2
"""Rounds over all chunk servers for one payload; the courier tries again later."""
RENEW_EVERY_S: Final = 5.0
"""Reports of groups in progress: a small part of a lease's validity."""
HELD_CHECK_S: Final = 1.0
"""Asking which finished groups may be forgotten."""
AWAY_RETRY_S: Final = 0.5
"""Between two calls of a courier to a controller that is away."""
COURIER_ROUND_S: Final = 0.25
"""The courier looks for work at least this often."""
PREFILL_TOKENS: Final = 16_384
"""Padded tokens in one prefill pass; bounds its memory."""
PROMPTS_KEPT: Final = 1_024
"""Recently made items, so that scoring n samples of a prompt makes the prompt once."""
ENVIRONMENT_START_S: Final = 120.0
"""Importing the user's module on a busy machine; calls have `environment.timeout_s`."""
ENVIRONMENT_EXIT_S: Final = 5.0
"""For an environment's process to end when it is asked to; then it is killed."""
PARTIAL_EVERY_S: Final = 4.0
"""Between two snapshots of groups in progress, from which another rollout could continue."""
IDLE_WAIT_S: Final = 0.1
"""A rollout with nothing to sample looks again after this; new work wakes it sooner."""
TELL_EVERY_S: Final = 0.25
"""Between two notes of a rollout's progress to its reporting thread."""
RATE_WINDOW_S: Final = 15.0
"""Over which tokens per second are averaged."""
FLUSH_S: Final = 2.0
"""For the last report after SIGTERM; well within the grace that the agent gives."""

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
BATCH_RETRY_S: Final = 1.0
"""Between two calls for a batch to a controller that is away."""
MODEL_FILE_MAX_BYTES: Final = 64 * 1024 * 1024
"""One auxiliary file of a model, such as its tokenizer, that is kept with every anchor."""
BUILD_WAIT_S: Final = 900.0
"""How long to wait for another process that builds the same model."""

# -- API ----------------------------------------------------------------------------------------------------------------
SSE_HEARTBEAT_S: Final = 10.0
"""Silence on an event stream after which a comment is sent, so that proxies and readers know that it lives."""
SSE_SILENCE_S: Final = 2.5 * SSE_HEARTBEAT_S
"""A reader that heard not even a comment for this long takes the stream for broken and opens it again."""
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
STREAM_RETRY_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Waits of a client between attempts to open an event stream again; the last one repeats."""
TAIL_POLL_S: Final = 0.4
"""How often the newest event id is read while somebody listens: one small query for all readers together."""

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
"""One report of an agent; a controller that takes longer is away."""
AGENT_REPORT_BACKOFF_S: Final = (0.5, 1.0, 2.0)
"""Waits after failed reports in a row; the last one repeats."""
SELF_FENCE_WARN_S: Final = 60.0
"""An agent that reaches neither etcd nor the controller for this long says so. Its policy is `keep`: workers go on."""
CACHE_BYTES: Final = 16 * 1024 * MIB
"""Chunks that a node caches beside the run store; the oldest leave when it is exceeded."""
CACHE_PRUNE_EVERY_S: Final = 30.0
"""Between two looks at the size of a node's cache."""
EXIT_SENTENCE_CHARS: Final = 500
"""Of a worker's last line that are quoted as the cause of its end; the rest is in its log."""
AGENT_REST_S: Final = 0.01
"""Least time between two looks of an agent, however often it is woken."""
REGISTER_ATTEMPT_S: Final = 5.0
"""One attempt to register a node; then it says that it waits for etcd and tries again."""
STRAY_SCAN_EVERY_S: Final = 2.0
"""Between two looks for processes that left their worker's group."""
NODE_RANKS_MAX: Final = 64
"""Ranks that an agent starts for one worker, whatever the spec it reads says."""
LOG_COPY_BYTES: Final = 256 * KIB
"""Held in memory at a time while a worker's log is rotated."""
