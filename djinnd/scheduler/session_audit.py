"""The invariants of one session of a model: its tokens, edits, stage, request and pages agree."""

from __future__ import annotations

from djinnd.core.session import Session
from djinnd.core.stops import Stage
from djinnd.scheduler.residency.kv_residency import KvResidency


def check_session(session: Session, residency: KvResidency, limit: int, num_blocks: int) -> None:
    """Asserts that the session agrees with its request and its pages. `limit` and `num_blocks`: the most tokens of a
    session of its model, and the number of the model's blocks."""
    kv = residency.kv
    name, length, computed, request = session.id, len(session.tokens), session.computed, session.request
    assert 0 <= computed <= length <= limit, f"session {name}: {computed} of {length} tokens computed"
    numbers = [edit.number for edit in session.edits]
    assert numbers == sorted(set(numbers)), f"session {name} has edits {numbers}"
    assert all(edit.extents for edit in session.edits), f"session {name} has an edit that changes nothing"
    if session.stage is not None:
        _check_stage(session, session.stage, residency, num_blocks)
    if session.left_stage is not None:
        assert session.stage is None and session.left_stage.length == length, (
            f"session {name} has a stage on and off the device, or another length than when it left"
        )
    left = residency.lower_tiers.left.get(name)
    staged = left is not None and left.staged > 0
    assert staged == (session.left_stage is not None), f"session {name}: {session.left_stage}, and {left}"
    pages, least, most = kv.pages_held(name), kv.pages_for(computed), kv.pages_for(length)
    for page in kv.pages_of(name)[computed // kv.page_size :]:
        assert kv.may_write(page), f"session {name} would write into page {page}, which other sessions hold or can find"
    if residency.is_arriving(session):
        assert pages >= least, f"session {name} arrives with {pages} pages for {computed} tokens"
        return
    if request is None:
        assert pages == (least if session.stage is None else most), (
            f"idle session {name} holds {pages} pages for {computed} tokens"
        )
        return
    assert least <= pages <= most, f"session {name} holds {pages} pages, {computed} of {length} tokens computed"
    assert computed < length, f"request {request.id} has nothing to run"
    assert 0 <= request.first <= request.prompt_end <= length, (
        f"request {request.id}: its prompt is no part of the session"
    )
    generated = length - request.prompt_end
    assert generated == 0 or generated < request.max_tokens, f"request {request.id} goes on after {generated}"


def _check_stage(session: Session, stage: Stage, residency: KvResidency, num_blocks: int) -> None:
    kv = residency.kv
    name, length, to_end = session.id, len(session.tokens), num_blocks + 1
    assert kv.pages_held(name) == kv.pages_for(length), f"session {name} has a stage without all of its pages"
    assert not residency.is_arriving(session), f"session {name} has a stage and is arriving"
    assert session.computed <= stage.done < length, f"session {name}: {stage}, {session.computed} of {length} tokens"
    assert 0 <= stage.first <= stage.last <= to_end and stage.first < to_end, f"session {name}: {stage}"
    if session.request is None or stage.last == to_end:
        assert (stage.done, stage.last) == (session.computed, to_end), f"session {name}: {stage}"
