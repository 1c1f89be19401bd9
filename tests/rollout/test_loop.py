"""The whole rollout over a real store and a real chunk server: what is finished is never lost, what is refused is dropped."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from agents.rollout import loop
from agents.rollout.apply import Follower
from agents.rollout.chunks import Chunks
from agents.rollout.courier import Courier
from agents.rollout.engines.local import TransformersEngine
from agents.rollout.environments import Environment, Prompt, open_environment
from agents.rollout.loop import Rollout
from agents.rollout.results import Results, pack
from tests.rollout.world import RUN, Done, Ledger, Place, Trainer, make_spec
from whimbrel import limits, wire
from whimbrel.checkpoint import DirectoryStore, HostWeights, LogReader, store_fetch
from whimbrel.checkpoint.manifest import WEIGHTS_FILE
from whimbrel.checkpoint.stores import chunk_name
from whimbrel.errors import EnvironmentFailed, UsageError
from whimbrel.transport import ChunkClient, ChunkServer
from whimbrel.wire.payload import GroupPayload, Sample, VersionSpan
from whimbrel.wire.work import ReportReply

TOKEN = "cluster"


class Server:
    """A chunk server on its own loop thread."""

    def __init__(self, store: DirectoryStore) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = ChunkServer("127.0.0.1", 0, TOKEN, sources=[store], sink=store)
        asyncio.run_coroutine_threadsafe(self.server.start(), self._loop).result(10)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class World:
    """A trainer's node, and a rollout that runs in a thread."""

    def __init__(self, path: Path, groups: int, **spec: object) -> None:
        (path / "model").mkdir()
        self.store = DirectoryStore(path / "store")
        self.cache = DirectoryStore(path / "cache")
        self.trainer = Trainer(self.store, path / "model")
        self.server = Server(self.store)
        self.client = ChunkClient(TOKEN)
        self.place = Place(make_spec(**spec))
        self.ledger = Ledger(groups)
        self.incidents: list[str] = []
        self.engine = TransformersEngine.of(self.place.spec)
        self.environment = open_environment(self.place.spec.environment, self.place.spec.seed)
        self.chunks = Chunks(
            self.client,
            self.cache,
            lambda: [self.server.server.address],
            lambda _d, message: self.incidents.append(message),
        )
        self.rollout = self._make()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _make(self) -> Rollout:
        return Rollout(
            self.place,
            self.engine,
            self.environment,
            self.chunks,
            lambda results, wake: Courier(self.place.caller, self.ledger, self.chunks, results, 3, wake),
            lambda _kind, message: self.incidents.append(message),
        )

    def start(self) -> None:
        self.place.show(self.trainer.head())
        self._thread.start()

    def _run(self) -> None:
        try:
            self.rollout.run()
        except Done:
            return
        except BaseException as error:
            self.failure = error

    def until(self, condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.failure is not None:
                raise self.failure
            assert time.monotonic() < deadline, (
                f"{self.place.phases[-3:]} {self.place.notes[-2:]} {self.incidents[-2:]}"
            )
            time.sleep(0.01)

    def end(self) -> None:
        self.place.ended = True
        if self._thread.ident is not None:
            self._thread.join(10)
        self.client.close()
        self.server.close()
        if self.failure is not None:
            raise self.failure

    def payload(self, group_id: str) -> GroupPayload:
        return wire.decode_message(self.store.get(self.ledger.finished[group_id].payload), GroupPayload)

    def engine_holds(self) -> bool:
        held = all(np.array_equal(self.engine.weights.bits(name), bits) for name, bits in self.trainer.bits.items())
        return held and self.engine.version == self.trainer.manifest.version


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(groups: int = 6, **spec: object) -> World:
        worlds.append(World(tmp_path, groups, **spec))
        return worlds[-1]

    yield make
    for world in worlds:
        world.end()


def test_finished_groups_are_durable_whole_and_reported(make_world: Callable[..., World]) -> None:
    world = make_world(6)
    world.start()
    world.until(lambda: len(world.ledger.finished) == 6)
    for number in range(6):
        payload = world.payload(f"grp_{number}")
        assert [sample.sample for sample in payload.samples] == [0, 1, 2, 3]
        assert payload.prompt_text == world.environment.prompt(number).text
        for sample, meta in zip(payload.samples, world.ledger.finished[f"grp_{number}"].trajectories, strict=True):
            assert (
                len(sample.tokens) == len(sample.logprobs) == sum(span.length for span in sample.spans) == meta.tokens
            )
            assert sample.reward == meta.reward
            assert meta.min_version == meta.max_version == 0
    assert payload.sampler["engine"] == "transformers"
    world.until(lambda: len(world.rollout.courier.results) == 0)
    world.until(lambda: world.place.counters.get("groups_finished") == 6)


def test_no_work_is_leased_before_a_version_is_applied(make_world: Callable[..., World]) -> None:
    world = make_world(2)
    world._thread.start()
    time.sleep(0.6)
    assert not world.ledger.leases
    assert world.place.phases[-1] == "waiting"
    world.place.show(world.trainer.head())
    world.until(lambda: len(world.ledger.finished) == 2)
    assert all(request.policy_version == 0 for request in world.ledger.leases)


def test_every_version_is_applied_bit_for_bit(make_world: Callable[..., World]) -> None:
    world = make_world(200)
    world.start()
    world.until(lambda: world.engine.version == 0)
    for _ in range(4):
        world.trainer.step()
        world.place.show(world.trainer.head())
        world.until(lambda: world.place.version == world.trainer.manifest.version)
    for _ in range(3):  # several at once
        world.trainer.step()
    world.place.show(world.trainer.head())
    world.until(lambda: world.place.version == 7)
    world.place.ended = True
    world._thread.join(10)
    assert world.engine_holds()
    world.rollout.follower.host.scrub()
    spans = [
        span for group in world.ledger.finished for sample in world.payload(group).samples for span in sample.spans
    ]
    assert {span.version for span in spans} <= set(range(8))
    assert world.place.gauges["generation_pause_ms"] >= 0
    assert world.place.counters["versions_applied"] == 8


def test_no_result_is_lost_while_the_controller_is_away(make_world: Callable[..., World]) -> None:
    world = make_world(5)
    world.ledger.release_now = False
    world.start()
    world.until(lambda: len(world.ledger.leased) >= 3)
    world.ledger.away = True
    world.until(lambda: len(world.rollout.courier.results) >= 3)
    world.until(lambda: any("finished groups are kept" in note for note in world.place.notes))
    world.ledger.away = False
    world.until(lambda: len(world.ledger.finished) == 5)
    # A restored database may have lost what it had accepted: it is sent again.
    lost = world.ledger.finished.pop("grp_1")
    world.until(lambda: "grp_1" in world.ledger.finished)
    assert world.ledger.finished["grp_1"] == lost
    world.ledger.release_now = True
    world.until(lambda: len(world.rollout.courier.results) == 0)


def test_refused_results_are_dropped_and_counted(make_world: Callable[..., World]) -> None:
    world = make_world(4)
    world.ledger.refuse = {"grp_0", "grp_2"}
    world.start()
    world.until(lambda: set(world.ledger.finished) == {"grp_1", "grp_3"})
    world.until(lambda: len(world.rollout.courier.results) == 0)
    world.until(lambda: world.place.counters.get("tokens_wasted", 0) >= 8)


def test_held_bounds_pause_new_work(make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HELD_GROUPS_MAX", 3)
    world = make_world(8)
    world.ledger.release_now = False
    world.start()
    world.until(lambda: len(world.ledger.finished) >= 3)
    time.sleep(0.3)
    assert len(world.ledger.leased) <= 6
    world.ledger.release_now = True
    world.until(lambda: len(world.ledger.finished) == 8)


def test_more_groups_than_one_report_may_name_go_in_several(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REPORT_GROUPS_MAX", 2)
    monkeypatch.setattr("agents.rollout.courier.RENEW_EVERY_S", 0.0)
    world = make_world(9)
    real, go_on = world.environment, threading.Event()

    class Slow:
        describe, score, close = real.describe, real.score, real.close

        def prompt(self, index: int) -> Prompt:
            go_on.wait(20)
            return real.prompt(index)

    world.rollout._environment = Slow()
    world.start()

    def renewed() -> set[str]:
        return {one.group_id for report in world.ledger.reports for one in report.partial}

    world.until(lambda: renewed() == {"grp_0", "grp_1", "grp_2"})
    go_on.set()
    world.until(lambda: len(world.ledger.finished) == 9)


def test_a_paused_run_finishes_what_it_has_and_begins_nothing(make_world: Callable[..., World]) -> None:
    world = make_world(100)
    world.start()
    world.until(lambda: len(world.ledger.finished) >= 2)
    world.place.paused = True
    world.until(
        lambda: set(world.ledger.leased) == set(world.ledger.finished) and world.rollout.courier.desk.open is False
    )
    leased = len(world.ledger.leased)
    time.sleep(0.4)
    assert len(world.ledger.leased) == leased < 100


def test_a_corrupt_chunk_in_the_cache_is_repaired(make_world: Callable[..., World], tmp_path: Path) -> None:
    world = make_world(1)
    for digest in world.trainer.manifest.chunk_digests()[:2]:
        world.cache.put(digest, world.store.get(digest))
        path = tmp_path / "cache" / chunk_name(digest)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
    world.start()
    world.until(lambda: len(world.ledger.finished) == 1)
    assert any("other bytes" in message for message in world.incidents)
    assert world.engine_holds()


def test_a_host_copy_that_went_wrong_is_built_anew_from_the_anchor(make_world: Callable[..., World]) -> None:
    world = make_world(1)
    world.start()
    world.until(lambda: len(world.ledger.finished) == 1)
    held = world.rollout.follower.host
    for bits in held.tensors.values():
        bits ^= np.uint16(4)  # a machine with bad memory
    held.state_digest ^= 1
    world.trainer.step()
    world.place.show(world.trainer.head())
    world.until(lambda: world.place.version == 1)
    assert any("did not verify" in message for message in world.incidents)
    assert world.engine_holds()
    assert world.rollout.follower.host is not held


def test_generation_does_not_wait_for_an_anchor_that_is_on_its_way(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    store = DirectoryStore(tmp_path / "store")
    trainer = Trainer(store, tmp_path / "model")
    anchor = trainer.digest, trainer.manifest
    weights = {ref.digest for record in anchor[1].files if record.name == WEIGHTS_FILE for ref in record.chunks}
    trainer.step()
    fast, asked = threading.Event(), threading.Event()
    fast.set()

    class Source:
        def fetch(self, digests: Sequence[str]) -> Mapping[str, bytes]:
            if weights.intersection(digests):
                asked.set()
                assert fast.wait(20)
            return store_fetch(store)(digests)

    place, source = Place(make_spec()), Source()
    follower, engine = Follower(place, source, lambda *_: None), TransformersEngine.of(place.spec)  # type: ignore[arg-type]
    reader = LogReader(source.fetch, RUN)
    follower._take_anchor(reader, *anchor)
    follower.bring(engine)
    follower._take_delta(trainer.digest, trainer.manifest)
    fast.clear()
    asked.clear()
    loading = threading.Thread(target=follower._take_anchor, args=(reader, *anchor))
    loading.start()
    assert asked.wait(10)
    bringing = threading.Thread(target=follower.bring, args=(engine,), daemon=True)
    bringing.start()
    bringing.join(5)
    assert engine.version == 1
    fast.set()
    loading.join(10)


def test_a_partial_group_is_continued(make_world: Callable[..., World]) -> None:
    world = make_world(1)
    probe = TransformersEngine.of(world.place.spec)
    host = HostWeights(RUN)
    reader = LogReader(store_fetch(world.store), RUN)
    reader.restore(host, world.trainer.digest)
    tokens = [int(token) for token in range(3, 7)]
    partial = GroupPayload(
        group_id="grp_0",
        index=0,
        attempt=0,
        prompt_tokens=_prompt_tokens(world, probe, host, reader),
        samples=[
            Sample(
                sample=number,
                tokens=tokens,
                logprobs=[-1.0] * 4,
                spans=[VersionSpan(0, 0, 4)],
                finish_reason="length" if number == 1 else "",
            )
            for number in range(4)
        ],
    )
    world.ledger.partials["grp_0"] = world.client.put(world.server.server.address, wire.encode_message(partial))
    world.start()
    world.until(lambda: len(world.ledger.finished) == 1)
    payload = world.payload("grp_0")
    assert all(sample.tokens[:4] == tokens for sample in payload.samples)
    assert payload.samples[1].tokens == tokens
    assert all(len(sample.tokens) > 4 for sample in payload.samples if sample.sample != 1)


def test_an_environment_that_fails_is_reported_as_a_failure(make_world: Callable[..., World]) -> None:
    world = make_world(3)
    real = world.environment

    class Flaky:
        def prompt(self, index: int) -> Prompt:
            if index == 1:
                raise EnvironmentFailed("no prompt today")
            return real.prompt(index)

        def score(self, index: int, completion: str) -> float:
            if index == 2:
                raise EnvironmentFailed("no reward today")
            return real.score(index, completion)

        def describe(self) -> str:
            return "flaky"

        def close(self) -> None: ...

    world.rollout._environment = Flaky()
    world.start()
    world.until(lambda: set(world.ledger.failed) == {"grp_1", "grp_2"} and set(world.ledger.finished) == {"grp_0"})


def test_a_rollout_that_waits_for_a_slow_environment_says_so(make_world: Callable[..., World]) -> None:
    """`working` without progress would be taken for a hang, and the worker be started anew for ever."""
    world = make_world(1)
    real, begun, go_on = world.environment, threading.Event(), threading.Event()

    class Slow(Away):
        def score(self, index: int, completion: str) -> float:
            begun.set()
            go_on.wait(20)
            return real.score(index, completion)

    world.rollout._environment = Slow(real)
    world.start()
    world.until(begun.is_set)
    world.until(lambda: "waiting for the environment" in world.place.notes and world.place.phases[-1] == "waiting")
    go_on.set()
    world.until(lambda: len(world.ledger.finished) == 1)


class Away:
    """An environment that gives prompts and no reward."""

    def __init__(self, real: Environment) -> None:
        self.prompt, self.describe, self.close = real.prompt, real.describe, real.close

    def score(self, index: int, completion: str) -> float:
        raise EnvironmentFailed("no reward today")


def test_an_environment_that_never_worked_ends_the_worker_with_its_reason(make_world: Callable[..., World]) -> None:
    world = make_world(20)
    world.rollout._environment = Away(world.environment)
    world.place.show(world.trainer.head())
    with pytest.raises(UsageError, match="8 prompt groups in a row: no reward today"):
        world.rollout.run()


def test_an_environment_that_is_away_for_a_while_is_told_and_waited_for(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "ENVIRONMENT_RETRY_S", 0.2)
    world = make_world(100)
    world.trainer.step()
    world.rollout._environment = Away(world.environment)
    world.start()
    world.until(lambda: any("in a row: no reward today" in text for text in world.incidents))
    world.until(lambda: "no reward today" in world.place.notes[-1])
    world.rollout._environment = world.environment
    world.until(lambda: len(world.ledger.finished) > 0)
    assert len(world.incidents) == 1


def test_at_its_end_a_rollout_hands_in_how_far_it_came(make_world: Callable[..., World]) -> None:
    world = make_world(3, sampling={"max_tokens": 100_000})
    world.start()
    world.until(lambda: world.place.counters.get("tokens_generated", 0) > 20)
    world.place.ended = True
    world._thread.join(10)
    partials = [each for report in world.ledger.reports for each in report.partial if each.payload]
    done = set(world.ledger.finished)
    assert done | {each.group_id for each in partials} == set(world.ledger.leased)
    for each in partials:
        kept = wire.decode_message(world.store.get(each.payload), GroupPayload)
        assert sum(len(sample.tokens) for sample in kept.samples) == each.tokens


def test_a_result_without_all_its_parts_is_never_made() -> None:
    whole = Sample(
        sample=0, tokens=[1], logprobs=[-0.5], spans=[VersionSpan(3, 0, 1)], finish_reason="stop", reward=1.0
    )
    pack(_payload(whole))
    for wrong in (
        {"tokens": []},
        {"logprobs": []},
        {"spans": []},
        {"finish_reason": ""},
        {"reward": None},
    ):
        with pytest.raises(AssertionError):
            pack(_payload(Sample(**{**{name: getattr(whole, name) for name in whole.__struct_fields__}, **wrong})))


def test_results_leave_only_when_released_or_refused() -> None:
    results = Results()
    results.finish(
        _payload(
            Sample(
                sample=0, tokens=[1], logprobs=[-0.5], spans=[VersionSpan(3, 0, 1)], finish_reason="stop", reward=1.0
            )
        )
    )
    assert not results.unreported()  # not before the payload is durable
    results.unstored()[0].stored = True
    (result,) = results.unreported()
    assert results.settle(ReportReply(accepted=["grp_0"]), ["grp_0"], []) == 0
    assert results.accepted() == ["grp_0"]
    results.settle(ReportReply(resend=["grp_0"]), [], [])
    assert results.unstored()
    results.unstored()[0].stored = True
    assert results.unreported() == [result]
    assert results.settle(ReportReply(refused={"grp_0": "lost"}), ["grp_0"], []) == 1
    assert len(results) == 0


def _payload(sample: Sample) -> GroupPayload:
    return GroupPayload(group_id="grp_0", index=0, attempt=1, prompt_tokens=[1], samples=[sample])


def _prompt_tokens(world: World, probe: TransformersEngine, host: HostWeights, reader: LogReader) -> list[int]:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in reader.files(world.trainer.manifests[0]).items():
            (Path(folder) / name).write_bytes(data)
        probe.load(0, Path(folder), host.layout, host.tensors)
    return probe.encode(world.environment.prompt(0).messages)
