"""One method per resource and verb. Answers are the JSON objects that `api/v1/models.py` describes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import httpx

from api.client.problems import raise_for_problem, unreachable
from whimbrel.limits import API_TIMEOUT_S, PAGE_MAX

Json = dict[str, Any]


class Client:
    """A connection to one controller. Every method raises `Unreachable` when it does not answer."""

    def __init__(
        self, url: str, token: str, *, timeout_s: float = API_TIMEOUT_S, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout_s, transport=transport, trust_env=False
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.http.close()

    # -- runs --

    def start_run(self, spec: Mapping[str, Any], *, idempotency_key: str = "") -> Json:
        """Create a run; with the same key and spec again, the first answer."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return self._call("POST", "/v1/runs", json=spec, headers=headers)

    def runs(self, *, state: str = "", limit: int = PAGE_MAX) -> list[Json]:
        """At most `limit` runs, newest first."""
        return self._collect("/v1/runs", limit, {"state": state} if state else {})

    def run(self, ref: str) -> Json:
        """One run by id or unique name."""
        return self._call("GET", f"/v1/runs/{_part(ref)}")

    def act(self, ref: str, verb: str) -> Json:
        """`start`, `stop`, `pause` or `resume`: the desired state is durable when this returns."""
        return self._call("POST", f"/v1/runs/{_part(ref)}/{verb}")

    def workers(self, ref: str) -> list[Json]:
        return self._call("GET", f"/v1/runs/{_part(ref)}/workers")["items"]

    def logs(self, ref: str, worker: str, *, tail_bytes: int | None = None) -> Json:
        """The end of a worker's log, read from its node."""
        params = {} if tail_bytes is None else {"tail": tail_bytes}
        return self._call("GET", f"/v1/runs/{_part(ref)}/workers/{_part(worker)}/logs", params=params)

    def versions(self, ref: str, *, limit: int = PAGE_MAX) -> list[Json]:
        """At most `limit` committed versions, newest first."""
        return self._collect(f"/v1/runs/{_part(ref)}/versions", limit, {})

    def version(self, ref: str, number: int) -> Json:
        return self._call("GET", f"/v1/runs/{_part(ref)}/versions/{number}")

    def metrics(self, ref: str, *, after_step: int = -1, names: str = "") -> Json:
        params: Json = {"after_step": after_step} | ({"names": names} if names else {})
        return self._call("GET", f"/v1/runs/{_part(ref)}/metrics", params=params)

    def audit(self, ref: str) -> Json:
        return self._call("GET", f"/v1/runs/{_part(ref)}/audit")

    # -- incidents, events --

    def incidents(self, *, run: str = "", limit: int = PAGE_MAX) -> list[Json]:
        return self._collect("/v1/incidents", limit, {"run": run} if run else {})

    def incident(self, incident_id: str) -> Json:
        return self._call("GET", f"/v1/incidents/{_part(incident_id)}")

    def events(self, *, after: int | None = None, run: str = "", limit: int = PAGE_MAX) -> Json:
        """A page of events in order of their ids; without `after`, the newest ones."""
        params: Json = {"limit": limit}
        if after is not None:
            params["after"] = after
        if run:
            params["run"] = run
        return self._call("GET", "/v1/events", params=params)

    # -- nodes --

    def nodes(self) -> list[Json]:
        return self._collect("/v1/nodes", PAGE_MAX, {})

    def node(self, node_id: str) -> Json:
        return self._call("GET", f"/v1/nodes/{_part(node_id)}")

    def act_node(self, node_id: str, verb: str) -> Json:
        """`cordon`, `uncordon` or `drain`."""
        return self._call("POST", f"/v1/nodes/{_part(node_id)}/{verb}")

    # -- the controller itself --

    def ready(self) -> Json:
        """What /readyz says, ready or not."""
        return self._send("GET", "/readyz").json()

    def leader(self) -> Json:
        return self._send("GET", "/leader").json()

    def version_info(self) -> Json:
        return self._call("GET", "/version")

    # -- transfer --

    def _call(self, method: str, path: str, **options: Any) -> Json:
        response = self._send(method, path, **options)
        raise_for_problem(response)
        return response.json()

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self.http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise unreachable(self.url, error) from error

    def _pages(self, path: str, limit: int, params: Json) -> Iterator[Json]:
        cursor = None
        left = limit
        while left > 0:
            query = params | {"limit": min(left, PAGE_MAX)} | ({"cursor": cursor} if cursor else {})
            page = self._call("GET", path, params=query)
            yield from page["items"]
            left -= len(page["items"])
            cursor = page.get("next_cursor")
            if not cursor:
                return

    def _collect(self, path: str, limit: int, params: Json) -> list[Json]:
        return list(self._pages(path, limit, params))


def _part(text: str) -> str:
    return quote(text, safe="")
