from __future__ import annotations

import pytest

from whimbrel.coordination import Etcd

SHORT_CALL_S = 0.7


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls to etcd give up soon, so that tests with a stopped etcd are short."""
    defaults = Etcd.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "timeout_s", SHORT_CALL_S)
