"""The doctor says what is there, what works, and for what does not how to mend it."""

import json

import pytest

from tulle.cli import doctor, main
from tulle.cli.machine import Check

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # torchrun's


def test_the_doctor_as_json_is_one_object(capsys, one_thread):
    assert main(["doctor", "--processes", "2", "--json"]) == 0
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert found["ok"]
    assert found["backends"]["gloo"]
    assert set(found["versions"]) == {"tulle", "torch", "python"}
    assert found["devices"]["cores"] >= 1
    assert [found["ranks"][rank]["reached"] for rank in "01"] == [[0, 1], [0, 1]]
    network = found["network"]["data"]
    assert network["latency_s"] > 0
    assert network["bandwidth_bytes_per_s"] > 0


def test_one_process_has_no_network_to_measure(capsys, one_thread):
    assert main(["doctor", "--processes", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # Infinity is no JSON
    assert found["network"] == {}
    assert found["checks"][-1]["detail"].startswith("1 process alone has nobody to reach")


def test_processes_that_fail_are_a_cross_with_its_mend(capsys, monkeypatch, tmp_path, one_thread):
    script = tmp_path / "ranks.py"
    script.write_text("raise RuntimeError('Connection refused')")
    monkeypatch.setattr(doctor, "machine_checks", lambda: [Check("gloo", True, "available")])
    monkeypatch.setattr("tulle.cli.app.DoctorCommand.script_of_its_own", str(script))
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("✓ gloo")
    assert lines[1].startswith("✗ processes    2 processes: rank")
    assert "GLOO_SOCKET_IFNAME" in lines[-1]
