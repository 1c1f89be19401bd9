"""The fake API answers in the shapes of the real one: else the pages would be tested against a fiction."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.v1 import models
from tests.dashboard.fake_api import ADMIN, make_app
from tests.dashboard.fleet import Fleet
from tests.dashboard.shapes import RUN

SHAPES: dict[str, Any] = {
    "/v1/runs": models.Page[models.Run],
    f"/v1/runs/{RUN}": models.Run,
    f"/v1/runs/{RUN}/workers": models.Workers,
    f"/v1/runs/{RUN}/workers/trainer/logs": models.WorkerLog,
    f"/v1/runs/{RUN}/versions": models.Page[models.Version],
    f"/v1/runs/{RUN}/metrics": models.Series,
    f"/v1/runs/{RUN}/timeline": models.Timeline,
    f"/v1/runs/{RUN}/incidents": models.Page[models.Incident],
    f"/v1/runs/{RUN}/audit": models.Audit,
    f"/v1/runs/{RUN}/events": models.Events,
    "/v1/nodes": models.Page[models.Node],
    "/v1/incidents/incident_node": models.Incident,
}


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(make_app(Fleet(datetime.now(UTC))), headers={"Authorization": f"Bearer {ADMIN}"})


@pytest.mark.parametrize("path", SHAPES)
def test_the_fake_answers_in_the_real_shapes(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert SHAPES[path].model_validate_json(answer.content)
