"""POST /moe/settings: what may change while a server runs, and what is said where it may not."""

from __future__ import annotations

from moet.errors import RequestError
from tests.server.serving import serving


def test_tau_and_pool_reach_the_core_and_the_books_come_back() -> None:
    asked: list[dict[str, float | None]] = []
    with serving() as api:
        api.core.tune_experts = lambda **settings: asked.append(settings)
        answer = api.post("/moe/settings", {"tau": 0.5, "expert_pool_gib": 2})
        assert answer.status_code == 200
        assert len(answer.json()["layers"]) == 2
        assert api.post("/moe/settings", {}).status_code == 200
        api.post("/moe/settings", {"kv_gib": 0.5})
    assert asked == [
        {"tau": 0.5, "pool_bytes": 2 << 30, "kv_bytes": None},
        {"tau": None, "pool_bytes": None, "kv_bytes": 1 << 29},
    ]


def test_a_refusal_names_the_field() -> None:
    def refuse(*, tau: float | None, pool_bytes: int | None, kv_bytes: int | None) -> None:
        raise RequestError(f"tau is {tau}; it must be from 0 to 1", param="tau")

    with serving() as api:
        api.core.tune_experts = refuse
        answer = api.post("/moe/settings", {"tau": 3})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tau"
        wrong = api.post("/moe/settings", {"expert_pool_gib": "much"})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "expert_pool_gib"
        for name, size in (("expert_pool_gib", 1e308), ("kv_gib", -1)):
            wrong = api.post("/moe/settings", {name: size})
            assert wrong.status_code == 400
            assert wrong.json()["error"]["param"] == name
