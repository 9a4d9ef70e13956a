from __future__ import annotations

import asyncio

import pytest

from djinnd.server.checkpoints.records import NAME, ModelRecord, ModelRecords
from djinnd.server.models.open_files import FileIdentity

ONE = ModelRecord("/a", "/a", 1000, [1000, 1001], {"config.json": FileIdentity(1, 2, 3)})


def test_records_are_read_back_by_the_next_daemon(tmp_path):
    there = [ONE]

    async def main():
        records = ModelRecords(str(tmp_path), lambda: there)
        for _ in range(100):
            records.changed()
        there.append(ModelRecord("/b@1", "/b", 0, [0], {}))
        there.append(ModelRecord("configured", "/c", None, None, {}, "{{ messages }}"))
        records.changed()
        await records.close()

    asyncio.run(main())
    assert ModelRecords(str(tmp_path), list).read() == there
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("content", [b"", b"[", b"{}", b'[{"name": 1}]', b"\xff" * 100, b"[" * 100_000])
def test_a_damaged_file_counts_as_empty(tmp_path, content, caplog):
    (tmp_path / NAME).write_bytes(content)
    assert ModelRecords(str(tmp_path), list).read() == []
    assert "model_records_lost" in caplog.text


def test_a_full_disk_is_logged_and_the_next_change_is_written(tmp_path, caplog):
    async def main():
        records = ModelRecords(str(tmp_path / "missing"), lambda: [ONE])
        records.changed()
        await records.close()
        (tmp_path / "missing").mkdir()
        records.changed()
        await records.close()
        assert records.read() == [ONE]

    asyncio.run(main())
    assert "model_records_not_written" in caplog.text
