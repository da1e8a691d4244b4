# SPDX-License-Identifier: Apache-2.0
"""The page of the demo: controls, two texts, figures and plots, and what happens when a button is pressed."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gradio as gr
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.prompts import BUILTIN_PROMPTS
from ..decoding.criterion import SCHEDULES
from ..default_pair import load_default_pair
from ..drafts.modeling_dspark import DSparkDraftModel
from . import plots, rendering
from .api import MODELS, UNEXPECTED, add_endpoints
from .records import ACCEPTED, REJECTED, Progress
from .session import Pair, Session
from .settings import Limits, RunSettings


logger = logging.getLogger("transformers.dspark_hf.demo")

EXAMPLES_PER_DOMAIN = 2
CHAT, RAW = "Chat", "Raw text"
GREEDY, SAMPLING = "Greedy", "Sampling"
OWN_SCHEDULE = "the draft's own"
NO_TURN = "The line is full, or the connection broke. Please try again in a minute."
DRAFT_COLOUR, COPY_COLOUR, TARGET_COLOUR, REJECTED_COLOUR = "#1f9e78", "#9159c9", "#3f86cf", "#dd7a32"
PRIVATE = {"api_visibility": "private"}
AT_ONCE = {"queue": False, "show_progress": "hidden", **PRIVATE}


@dataclass
class _Run:
    """One comparison of one visitor, kept on the server: its stop signal and its progress."""

    settings: RunSettings
    stop: threading.Event = field(default_factory=threading.Event)
    latest: Progress | None = None
    begun: bool = False
    over: bool = False


@dataclass(frozen=True)
class _Controls:
    """The settings of a visitor; `inputs` in the order of `_settings`."""

    prompt: gr.Textbox
    inputs: list[Any]
    run: gr.Button
    stop: gr.Button


@dataclass(frozen=True)
class _Screen:
    """The components that a run changes, in the order of `components`."""

    status: gr.HTML
    sides: list[gr.HTML]  # heading and text, without and then with the draft
    figures: gr.HTML
    plots: list[Any]
    rounds: gr.HTML
    buttons: list[gr.Button]

    @property
    def components(self) -> list[Any]:
        return [self.status, *self.sides, self.figures, *self.plots, self.rounds, *self.buttons]


def build_demo(
    target: PreTrainedModel | None = None,
    draft: DSparkDraftModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    limits: Limits | None = None,
    enable_thinking: bool | None = None,  # initial setting of the thinking switch, if the chat template has one
) -> gr.Blocks:
    """Build the app; nothing is served yet, and no state is kept outside of what is returned."""
    if target is None and draft is None and tokenizer is None:
        target, draft, tokenizer = load_default_pair()
    if target is None or draft is None or tokenizer is None:
        raise ValueError("A pair is a target, its draft and the tokenizer, got only part of it. Give all, or none.")
    pair = Pair(target, draft, tokenizer, enable_thinking)
    session = Session(pair, limits)
    with gr.Blocks(title="DSpark demo", analytics_enabled=False) as demo:
        gr.HTML(rendering.header(Path(pair.target.config.name_or_path or "target").name, _facts(pair)))
        controls = _add_controls(session)
        screen = _add_screen(session, controls)
        _connect(session, controls, screen)
        add_endpoints(session)
    return demo.queue(max_size=session.limits.max_queue, default_concurrency_limit=1)


def serve(demo: gr.Blocks, host: str | None = None, port: int | None = None, wait: bool = True) -> str:
    """Serve the app."""
    _, url, _ = demo.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=not wait,
        quiet=not wait,
        share=False,
        ssr_mode=False,
        show_error=False,  # the page and the endpoints show the errors for visitors themselves
        max_file_size="1kb",  # nothing is uploaded
        run_history=False,  # nor kept
        state_session_capacity=200,  # a visitor's last run stays in memory
        footer_links=["api"],
        theme=_theme(),
        css_paths=[Path(__file__).with_name("style.css")],
    )
    return url


def _theme() -> gr.themes.Base:
    """System fonts: nothing is fetched from elsewhere."""
    fonts = ["ui-sans-serif", "system-ui", "sans-serif"]
    theme = gr.themes.Default(
        primary_hue="blue", neutral_hue="gray", font=fonts, font_mono=["ui-monospace", "Consolas", "monospace"]
    )
    return theme.set(block_radius="10px", button_large_radius="10px", input_radius="8px")


def _facts(pair: Pair) -> list[str]:
    weights = pair.dtype_name
    return [f"drafts of up to {pair.num_slots} tokens", weights, f"on {pair.target.device.type.upper()}"]


def _add_controls(session: Session) -> _Controls:
    limits, num_slots = session.limits, session.pair.num_slots
    saved = session.pair.draft.generation_config.num_assistant_tokens
    most_drafts = num_slots if saved is None else min(saved, num_slots)
    with gr.Row(equal_height=False):
        with gr.Column(scale=1, min_width=340):
            prompt = gr.Textbox(
                label="Prompt",
                placeholder="Ask something, or choose an example.",
                lines=4,
                max_lines=10,
                elem_id="prompt",
            )
            _add_examples(prompt)
        with gr.Column(scale=1, min_width=340):
            with gr.Row():
                mode = gr.Radio([CHAT, RAW], value=CHAT, label="Prompt is", min_width=140)
                decoding = gr.Radio([GREEDY, SAMPLING], value=GREEDY, label="Decoding", min_width=140)
            thinks = session.pair.thinks
            thinking = gr.Checkbox(bool(thinks), label="Thinking", visible=thinks is not None, elem_id="thinking")
            max_new_tokens = gr.Slider(
                1,
                limits.max_new_tokens,
                value=min(96, limits.max_new_tokens),
                step=1,
                label="Longest answer, in tokens",
            )
            with gr.Row(visible=False) as sampling:
                temperature = gr.Slider(0.1, 2, value=0.7, step=0.1, label="Temperature", min_width=140)
                top_p = gr.Slider(0.05, 1, value=0.9, step=0.05, label="Top-p", min_width=140)
            with gr.Accordion("Drafting and seed", open=False):
                drafts = gr.Slider(1, num_slots, value=most_drafts, step=1, label="Most drafts per round")
                schedule = gr.Dropdown([OWN_SCHEDULE, *SCHEDULES], value=OWN_SCHEDULE, label="Schedule")
                seed = gr.Number(0, precision=0, minimum=0, label="Seed")
            with gr.Row():
                run = gr.Button("Run", variant="primary", elem_id="run", min_width=120)
                stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="stop", min_width=120)
    decoding.change(
        lambda value: gr.update(visible=value == SAMPLING),
        decoding,
        sampling,
        **AT_ONCE,
    )
    inputs = [prompt, mode, decoding, temperature, top_p, max_new_tokens, drafts, schedule, seed, thinking]
    return _Controls(prompt, inputs, run, stop)


def _add_examples(prompt: gr.Textbox) -> None:
    chosen = []
    for domain in dict.fromkeys(example.domain for example in BUILTIN_PROMPTS):
        # Every other one: neighbours begin alike.
        chosen += [example for example in BUILTIN_PROMPTS if example.domain == domain][::2][:EXAMPLES_PER_DOMAIN]
    labels = [f"{example.domain}: {' '.join(example.text.split())[:30].rstrip()}…" for example in chosen]
    gr.Examples([[e.text] for e in chosen], [prompt], example_labels=labels, cache_examples=False, **PRIVATE)


def _add_screen(session: Session, controls: _Controls) -> _Screen:
    status = gr.HTML(rendering.status_line(None, session.pair.dtype_name), elem_id="status")
    figures = gr.HTML(rendering.figures(None), elem_id="figures")
    sides = []
    with gr.Row(equal_height=True):
        for with_draft, name in ((False, "plain"), (True, "dspark")):
            with gr.Column(min_width=320, elem_classes="ds-side", elem_id=f"side-{name}"):
                sides.append(gr.HTML(rendering.side_title(None, with_draft)))
                sides.append(gr.HTML(rendering.side_text(None, with_draft), max_height=420, autoscroll=True))
    gr.HTML(rendering.legend())
    with gr.Row():
        charts = _add_plots()
    with gr.Accordion("Round by round", open=False):
        rounds = gr.HTML(rendering.rounds_table(None, {}), elem_id="rounds")
    return _Screen(status, sides, figures, charts, rounds, [controls.run, controls.stop])


def _add_plots() -> list[Any]:
    origin_colours = {plots.DRAFTS: DRAFT_COLOUR, plots.COPIES: COPY_COLOUR, plots.OWN: TARGET_COLOUR}
    outcome_colours = {ACCEPTED: DRAFT_COLOUR, REJECTED: REJECTED_COLOUR}
    shared = {"min_width": 300, "tooltip": "all"}
    return [
        gr.BarPlot(
            x="round",
            y="tokens",
            color="origin",
            color_map=origin_colours,
            label="Accepted length per round",
            x_title="round",
            y_title="tokens",
            y_lim=[0, None],
            color_title=" ",
            elem_id="plot-rounds",
            **shared,
        ),
        gr.BarPlot(
            x="confidence",
            y="drafts",
            color="outcome",
            color_map=outcome_colours,
            label="Confidence against outcome",
            x_title="confidence of a draft",
            y_title="drafts",
            y_lim=[0, None],
            color_title=" ",
            elem_id="plot-confidence",
            **shared,
        ),
        gr.BarPlot(
            x="slot",
            y="accepted",
            label="Acceptance by position",
            x_title="position in the block",
            y_title="accepted, %",
            y_lim=[0, 100],
            elem_id="plot-slots",
            **shared,
        ),
    ]


class _Handlers:
    """What happens when a visitor presses a button."""

    def __init__(self, session: Session, num_outputs: int):
        self._session, self._unchanged = session, [gr.skip()] * num_outputs

    def prepare(self, run: _Run | None, *values: Any) -> list[Any]:
        """Check the settings and show an empty run."""
        if run is not None and not run.over:  # one run per visitor; the keyboard knows no disabled button
            return [gr.skip(), *self._unchanged]
        settings = _settings(self._session.pair.thinks is not None, *values)
        try:
            self._session.check(settings)
        except ValueError as error:
            return [gr.skip(), rendering.error_line(str(error)), *self._unchanged[1:]]
        return [_Run(settings), *_updates(self._session, Progress(settings))]

    def admit(self, run: _Run | None) -> None:
        """Let a prepared run wait for the models."""
        if run is None or run.begun:
            raise gr.Error("Nothing to run.", visible=False, print_exception=False)
        run.begun = True

    def stream(self, run: _Run) -> Iterator[list[Any]]:
        """Generate, and show the progress."""
        if run.over:  # stopped while it was queued
            yield self._unchanged
            return
        try:
            with contextlib.closing(self._session.compare(run.settings, run.stop)) as steps:
                for progress in steps:
                    before, run.latest = run.latest, progress
                    yield _updates(self._session, progress, before)
        except Exception:
            logger.exception("A comparison failed.")
            yield self.break_off(run, UNEXPECTED)
        finally:
            run.over = True

    def stop(self, run: _Run | None) -> list[Any]:
        """End a run early."""
        if run is None or run.over:
            return self._unchanged
        run.stop.set()
        if run.latest is not None:  # the stream says the rest, after what it has already sent
            return [*self._unchanged[:-1], gr.update(interactive=False)]
        run.over = True
        return _updates(self._session, Progress(run.settings, stopped=True))

    def break_off(self, run: _Run, message: str = NO_TURN) -> list[Any]:
        """Show that a run could not go on."""
        run.over = True
        shown = _updates(self._session, replace(run.latest or Progress(run.settings), stopped=True))
        return [rendering.error_line(message), *shown[1:]]


def _connect(session: Session, controls: _Controls, screen: _Screen) -> None:
    run_state, handlers = gr.State(None), _Handlers(session, len(screen.components))
    prepared = gr.on(
        [controls.run.click, controls.prompt.submit],
        handlers.prepare,
        [run_state, *controls.inputs],
        [run_state, *screen.components],
        **AT_ONCE,
    )
    # A separate step, so that a refused request does not queue for the models.
    admitted = prepared.then(handlers.admit, run_state, None, **AT_ONCE)
    streamed = admitted.success(
        handlers.stream,
        run_state,
        screen.components,
        show_progress="minimal",
        show_progress_on=screen.status,
        **MODELS,
        **PRIVATE,
    )
    streamed.failure(handlers.break_off, run_state, screen.components, **AT_ONCE)
    controls.stop.click(handlers.stop, run_state, screen.components, **AT_ONCE)


def _settings(
    has_switch, prompt, mode, decoding, temperature, top_p, max_new_tokens, drafts, schedule, seed, thinking
) -> RunSettings:
    return RunSettings(
        prompt=prompt or "",
        raw=mode == RAW,
        temperature=float(temperature) if decoding == SAMPLING else 0.0,
        top_p=float(top_p) if decoding == SAMPLING else 1.0,
        max_new_tokens=int(max_new_tokens),
        num_assistant_tokens=int(drafts),
        schedule=None if schedule == OWN_SCHEDULE else schedule,
        seed=seed,
        enable_thinking=bool(thinking) if has_switch and mode != RAW else None,
    )


def _updates(session: Session, progress: Progress, before: Progress | None = None) -> list[Any]:
    """New values of the screen's components. What has not changed since `before` is not sent again."""
    is_over = progress.phase in ("done", "stopped")
    is_new = progress.phase == "waiting"
    sides: list[Any] = []
    for with_draft, name in ((False, "plain"), (True, "dspark")):
        is_old = before is not None and getattr(before, name) is getattr(progress, name)
        if is_old and not is_over:
            sides += [gr.skip(), gr.skip()]
        else:
            sides += [rendering.side_title(progress, with_draft), rendering.side_text(progress, with_draft)]
    buttons = [gr.skip(), gr.skip()]
    if is_over or is_new:
        buttons = [gr.update(interactive=is_over), gr.update(interactive=is_new)]
    return [
        rendering.status_line(progress, session.pair.dtype_name),
        *sides,
        rendering.figures(progress),
        *(_charts(session, progress) if is_over or is_new else [gr.skip()] * 4),
        *buttons,
    ]


def _charts(session: Session, progress: Progress) -> list[Any]:
    """The plots and the table of rounds: drawn at the end, since drawing would take time from the models."""
    rounds = progress.dspark.rounds if progress.dspark is not None else ()
    ids = {token_id for record in rounds for token_id in (*record.token_ids, record.bonus_token)}
    texts = {token_id: session.pair.tokenizer.decode([token_id]) for token_id in ids if token_id is not None}
    if not rounds:
        return [None, None, None, rendering.rounds_table(progress, texts)]
    return [
        plots.tokens_per_round(rounds),
        plots.confidence_outcomes(rounds),
        plots.acceptance_by_slot(rounds),
        rendering.rounds_table(progress, texts),
    ]
