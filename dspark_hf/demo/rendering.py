# SPDX-License-Identifier: Apache-2.0
"""Records as HTML, by pure functions. Whatever a model or a visitor wrote is escaped here, and nowhere else."""

from __future__ import annotations

from html import escape

from ..common.records import AcceptanceStats, RoundRecord
from .records import (
    ACCEPTED,
    BONUS,
    COPIED,
    CORRECTION,
    PLAIN,
    REJECTED,
    UNJUDGED,
    Progress,
    Side,
    Token,
    draft_outcome,
)


ORIGIN_NAMES = {
    ACCEPTED: "accepted draft",
    COPIED: "accepted copy",
    CORRECTION: "target's correction",
    BONUS: "target's bonus",
    PLAIN: "target alone",
}
ORIGIN_HELP = {
    ACCEPTED: "proposed by the draft, kept by the target",
    COPIED: "copied from earlier in the text, kept by the target",
    CORRECTION: "written by the target in place of a rejected draft",
    BONUS: "added by the target after drafts that were accepted whole",
    PLAIN: "a step without drafts, or the first token",
}
PHASE_SENTENCES = {
    "idle": ("Ready", "Choose an example or write a prompt, then press Run."),
    "waiting": ("In line", "The models serve one request at a time."),
    "plain": ("1 of 2", "Writing without DSpark. The other side waits for its turn."),
    "dspark": ("2 of 2", "Writing with DSpark, the other side is done."),
}
OUTCOME_MARKS = {ACCEPTED: "✓", REJECTED: "✗", UNJUDGED: "–"}
MISSING = "–"


def side_title(progress: Progress | None, with_draft: bool) -> str:
    """The heading above one text: its name, whether it is running, and its speed."""
    name = "With DSpark" if with_draft else "Without DSpark"
    side = _side(progress, with_draft)
    state = _side_state(progress, side, with_draft)
    speed = _number(side.tokens_per_s, 1) if side is not None else MISSING
    count = f"{len(side.tokens)} tokens" if side is not None else "no tokens yet"
    return (
        f'<div class="ds-head" data-state="{state}"><h3>{name}</h3><span class="ds-chip">{state}</span>'
        f'<span class="ds-speed"><b>{speed}</b> tokens/s</span><span class="ds-count">{count}</span></div>'
    )


def side_text(progress: Progress | None, with_draft: bool) -> str:
    """One text, each token marked by its origin; the plain text has no marks."""
    side = _side(progress, with_draft)
    if side is None:
        hint = "The same prompt, answered by the target and its draft." if with_draft else "The target on its own."
        return f'<div class="ds-text ds-empty">{hint}</div>'
    difference = progress.first_difference if progress is not None else None
    spans = "".join(_token(token, i == difference, with_draft) for i, token in enumerate(side.tokens))
    is_over = side.finished or progress is None or progress.phase == "stopped"
    caret = "" if is_over else '<span class="ds-caret" aria-hidden="true"></span>'
    return f'<div class="ds-text">{spans}{caret}</div>'


def status_line(progress: Progress | None, dtype_name: str) -> str:
    """Which of the two is running, or how the comparison ended."""
    if progress is None:
        return _line("status", "idle", "idle", *PHASE_SENTENCES["idle"])
    phase = progress.phase
    if phase == "done":
        tone, sentence = _verdict(progress, dtype_name)
        return _line("status", phase, tone, "Done", sentence)
    if phase == "stopped":
        return _line("status", phase, phase, "Stopped", _stopped_sentence(progress))
    return _line("status", phase, phase, *PHASE_SENTENCES[phase])


def figures(progress: Progress | None) -> str:
    """The figures of a comparison as a row of cards."""
    plain, dspark = _side(progress, False), _side(progress, True)
    speedup = progress.speedup if progress is not None else None
    rates = [_number(side.tokens_per_s if side is not None else None, 1) for side in (plain, dspark)]
    times = "in tokens per second"
    if plain is not None and dspark is not None and speedup is not None:
        times = f"{plain.seconds:.1f} s without, {dspark.seconds:.1f} s with"
    cards = [
        _card("speedup", _speedup_title(progress), MISSING if speedup is None else f"{speedup:.2f}×", times),
        _card("tokens-per-s", "Tokens per second", rates[1], f"{rates[0]} without DSpark"),
        *_round_cards(dspark.stats if dspark is not None else AcceptanceStats()),
    ]
    return f'<div class="ds-cards">{"".join(cards)}</div>'


def legend() -> str:
    """The legend of the marks in the DSpark text."""
    items = "".join(
        f'<li><span class="ds-tok ds-{origin}">{escape(name)}</span> {escape(ORIGIN_HELP[origin])}</li>'
        for origin, name in ORIGIN_NAMES.items()
    )
    return f'<ul class="ds-legend" aria-label="Legend">{items}</ul>'


def rounds_table(progress: Progress | None, texts: dict[int, str]) -> str:
    """Every round: its drafts with their confidence and what became of them, and the target's own token."""
    side = _side(progress, True)
    if side is None or not side.rounds:
        return '<p class="ds-note">The rounds appear here when the run has ended.</p>'
    rows = "".join(_round_row(index, record, texts) for index, record in enumerate(side.rounds))
    names = ("Round", "Drafts sent", "Target's token", "Tokens")
    heads = "".join(f'<th scope="col">{name}</th>' for name in names)
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="ds-rounds">{table}</div>'


def error_line(message: str) -> str:
    """An error in the place of the status line."""
    return _line("alert", "error", "error", "Error", escape(message))


def header(target_name: str, facts: list[str]) -> str:
    """The top of the page."""
    chips = "".join(f"<li>{escape(fact)}</li>" for fact in [target_name, *facts])
    return (
        '<header class="ds-top"><h1>DSpark</h1><p>Speculative decoding for Hugging Face transformers: a small draft '
        "proposes a few tokens, the target checks them in one pass. The text stays the target's.</p>"
        f'<ul class="ds-facts" aria-label="The pair">{chips}</ul></header>'
    )


def _line(role: str, phase: str, tone: str, step: str, sentence: str) -> str:
    attributes = f'role="{role}" data-phase="{phase}" data-tone="{tone}"'
    return f'<div class="ds-status" {attributes}><b>{step}</b> {sentence}</div>'


def _side(progress: Progress | None, with_draft: bool) -> Side | None:
    if progress is None:
        return None
    return progress.dspark if with_draft else progress.plain


def _side_state(progress: Progress | None, side: Side | None, with_draft: bool) -> str:
    if progress is None:
        return "idle"
    if side is None:
        return "not run" if progress.phase == "stopped" else "waiting"
    if progress.phase == "stopped" and (with_draft or progress.dspark is None):
        return "stopped"
    return "finished" if side.finished else "running"


def _token(token: Token, is_difference: bool, with_draft: bool) -> str:
    classes = ["ds-tok", f"ds-{token.origin}"] if with_draft else ["ds-tok", "ds-unmarked"]
    if is_difference:
        classes.append("ds-differs")
    text = escape(token.text).replace("\n", '<span class="ds-newline"></span>\n')
    if not with_draft:
        return f'<span class="{" ".join(classes)}">{text}</span>'
    attributes = f' data-tip="{escape(_tip(token))}"'
    if token.confidence is not None:
        attributes += f' data-confidence="{token.confidence:.3f}"'
    return f'<span class="{" ".join(classes)}"{attributes}>{text}</span>'


def _tip(token: Token) -> str:
    parts = [ORIGIN_NAMES[token.origin]]
    if token.round_index is None:
        parts.append("from reading the prompt")
    else:
        parts.append(f"round {token.round_index + 1}")
    if token.slot is not None:
        parts.append(f"slot {token.slot}")
    if token.confidence is not None:
        whose = "confidence" if token.origin == ACCEPTED else "confidence of the rejected draft"
        parts.append(f"{whose} {_percent(token.confidence)}")
    return " · ".join(parts)


def _round_row(index: int, record: RoundRecord, texts: dict[int, str]) -> str:
    drafts = []
    for slot, token_id in enumerate(record.token_ids):
        fate = draft_outcome(record, slot)
        is_drawn = slot < record.num_drawn
        confidence = f" {_percent(record.confidence[slot])}" if is_drawn and slot < len(record.confidence) else ""
        source = "block" if is_drawn else "copy"
        drafts.append(
            f'<span class="ds-draft" data-fate="{fate}" data-source="{source}">'
            f'<span title="{fate}">{OUTCOME_MARKS[fate]}</span> '
            f"<code>{_visible(texts, token_id)}</code>{confidence}</span>"
        )
    own = f"<code>{_visible(texts, record.bonus_token)}</code>" if record.bonus_token is not None else MISSING
    sent = "".join(drafts) or f'<span class="ds-note">{"none paid" if record.drafted else "not drafted"}</span>'
    return f'<tr><th scope="row">{index + 1}</th><td>{sent}</td><td>{own}</td><td>{record.num_committed}</td></tr>'


def _visible(texts: dict[int, str], token_id: int) -> str:
    return escape(texts.get(token_id, f"#{token_id}")).replace("\n", "↵").replace(" ", "␣")


def _verdict(progress: Progress, dtype_name: str) -> tuple[str, str]:
    num_tokens = len(progress.plain.tokens) if progress.plain is not None else 0
    difference = progress.first_difference
    if not progress.settings.is_greedy:
        return "sampled", (
            "Sampled: the two texts differ by chance, and both follow the target's distribution exactly."
            if difference is not None
            else "Sampled: this time the two texts happen to be the same."
        )
    if difference is None:
        return "identical", f"The two texts are identical, token by token ({num_tokens} tokens)."
    sentence = f"The two greedy texts part at token {difference + 1}, outlined in both. "
    if dtype_name == "float32":
        return (
            "error",
            sentence + "In float32 they should be the same: please report this with <code>dspark-hf env</code>.",
        )
    return "differs", sentence + (
        f"In {escape(dtype_name)} a pass over one token and a pass over several round differently, so that texts may "
        "part where two tokens nearly tie. In float32 they are the same."
    )


def _stopped_sentence(progress: Progress) -> str:
    if progress.plain is None or progress.dspark is None or not progress.dspark.tokens:
        return "Ended by you before both sides had written."
    if not progress.settings.is_greedy:
        return "Ended by you. The figures are those of the part that was written."
    difference = progress.first_difference
    if difference is None:
        length = min(len(progress.plain.tokens), len(progress.dspark.tokens))
        return f"Ended by you. The first {length} tokens of both texts are the same."
    return f"Ended by you. The two texts part at token {difference + 1}."


def _speedup_title(progress: Progress | None) -> str:
    return "Speed-up" if progress is None or progress.phase in ("waiting", "done") else "Speed-up so far"


def _round_cards(stats: AcceptanceStats) -> list[str]:
    """Figures of the rounds so far; names only before the first."""
    length = verified = rate = MISSING
    copied = MISSING
    notes = ["tokens per round", "that the target had to check", "of the drafts sent", "from earlier in the text"]
    if stats.num_rounds:
        length, verified = f"{stats.accepted_length:.2f}", str(stats.num_verified)
        notes[:2] = [
            f"tokens per round, {stats.num_rounds} rounds",
            f"{stats.verified_per_token:.2f} per token written",
        ]
    if stats.num_drafted:
        rate = _percent(stats.acceptance_rate)
        notes[2] = f"{sum(record.num_accepted for record in stats.rounds)} of {stats.num_drafted} drafts sent"
        copied = str(stats.num_copied_accepted)
        notes[3] = f"accepted, of {stats.num_copied} copied from the text"
    return [
        _card("accepted-length", "Accepted length", length, notes[0]),
        _card("verified", "Verified tokens", verified, notes[1]),
        _card("acceptance-rate", "Drafts accepted", rate, notes[2]),
        _card("copied", "Copied tokens", copied, notes[3]),
    ]


def _card(name: str, title: str, value: str, note: str) -> str:
    return (
        f'<div class="ds-card" data-figure="{name}"><div class="ds-card-title">{title}</div>'
        f'<div class="ds-card-value">{value}</div><div class="ds-card-note">{note}</div></div>'
    )


def _number(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"
