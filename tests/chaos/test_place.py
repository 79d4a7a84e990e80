"""What is shut in a place does not outlive its maker: processes, mounts, folders, control groups.

One test: .venv/bin/pytest tests/chaos/test_place.py
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.chaos import groups, place
from tests.chaos.conftest import started
from tests.ray.rays import blocking_until, command, processes

MAKER = """
from tests.chaos.place import Place
with Place() as place:
    place.run("tests.chaos.settler")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_all_in_a_place_goes_however_its_maker_is_ended(number: signal.Signals, as_root: None) -> None:
    with started("-c", MAKER) as maker:
        assert maker.stdout is not None
        folder = Path(maker.stdout.readline().strip())
        name = folder.name
        assert name.startswith(place.PREFIX)
        assert groups.processes(groups.places(name))
        assert len([pid for pid in processes() if str(folder) in command(pid)]) >= 3
        maker.send_signal(number)
        maker.wait(2 * place.END_S)
    blocking_until(lambda: not any(str(folder) in command(pid) for pid in processes()), "all processes have ended")
    if number is signal.SIGKILL:
        assert folder.exists()
        # As the next maker does. The kernel may still be about to take the last one out of its control group.
        blocking_until(lambda: (place.remove_dead(), not folder.exists())[1], "the folder is removed")
    assert not folder.exists()
    assert not [path for path in groups.places(name) if Path(path).exists()]
    assert str(folder) not in Path("/proc/self/mounts").read_text()


def test_two_places_see_nothing_of_each_other(as_root: None) -> None:
    with started("-c", MAKER) as one, started("-c", MAKER) as other:
        folders = []
        for maker in (one, other):
            assert maker.stdout is not None
            folders.append(Path(maker.stdout.readline().strip()))
        one.terminate()
        one.wait(2 * place.END_S)
        place.remove_dead()
        assert not folders[0].exists()
        assert folders[1].exists()
        assert groups.processes(groups.places(folders[1].name))
