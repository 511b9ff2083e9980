"""The seam between versions, over real sockets."""

from __future__ import annotations

import pytest

from asyncrl.engines.sglang.http import WITH_SESSIONS, WITHOUT_SESSIONS, ServerApi, protocol_of
from asyncrl.errors import ConfigError
from asyncrl.weights.manifest import WeightsError
from tests.fakes.sglang import Script, scripted

OK = b'{"success":true,"message":"Success"}'
OPEN = b'{"success":false,"message":"a weight-update session is already open"}'


def asked(script: Script) -> list[str]:
    return [path for path, _, _ in script.requests]


def test_versions_are_chosen_by_name_and_others_refused():
    assert protocol_of("0.5.20", "u") is WITHOUT_SESSIONS
    assert (
        "retract" not in WITHOUT_SESSIONS.pause_modes
    )  # its flush while retracted requests wait ends the server
    assert protocol_of("0.5.23", "u") is WITH_SESSIONS
    for version in ("0.5.21", "0.6.0", ""):
        with pytest.raises(ConfigError, match=r"server u runs SGLang .*; supported are 0\.5\.20, .*0\.5\.23"):
            protocol_of(version, "u")


async def test_a_session_is_closed_whatever_happens_in_it():
    async with scripted() as script:
        server = ServerApi(script.url)
        script.says("/begin_weight_update", 200, OK)
        script.says("/end_weight_update", 200, OK)
        async with WITH_SESSIONS.update_session(server):
            assert asked(script) == ["/begin_weight_update"]
        assert asked(script)[1:] == ["/end_weight_update"]

        script.says("/end_weight_update", 400, OPEN)
        with pytest.raises(WeightsError, match="of the body"):
            async with WITH_SESSIONS.update_session(server):
                raise WeightsError("of the body")
        assert asked(script)[3:] == ["/end_weight_update"]
        with pytest.raises(WeightsError, match="already open"):  # its own
            async with WITH_SESSIONS.update_session(server):
                pass

        script.requests.clear()
        async with WITHOUT_SESSIONS.update_session(server):
            pass
        assert asked(script) == []
        await server.close()
