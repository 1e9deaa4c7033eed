"""The studio's page: components of Gradio, and which action each of them starts."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr

from coram_hf.studio.actions import NO_CHAT, NO_PAGE, NOTHING_YET, WIDEST, Actions, choices
from coram_hf.studio.roots import Roots
from coram_hf.studio.session import LINES
from coram_hf.studio.views import FOLDER

SYSTEM = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
MONO = ["ui-monospace", "Menlo", "Consolas", "monospace"]
TITLE = "CORAM studio"
MASTHEAD = (
    f'<div class="masthead"><h1>{TITLE}</h1><p>Merge fine-tuned models into one: look at the plan, merge, '
    "talk to the result, save it.</p></div>"
)
GRANULARITY = [
    ("lambda only: fastest", "lambda"),
    ("a factor per expert", "expert"),
    ("a factor per expert and group of modules", "group"),
    ("a factor per expert and layer: best, from eight prompts on", "layer"),
]


def appearance() -> dict[str, Any]:
    """Theme and style for `launch`, with fonts of the system instead of downloaded ones."""
    theme = gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=SYSTEM, font_mono=MONO)
    return {"theme": theme, "css": (FOLDER / "studio.css").read_text(encoding="utf-8")}


def build(roots: Roots) -> gr.Blocks:
    """The whole app, for one user: everybody who opens it sees the same session."""
    actions = Actions(roots)
    with gr.Blocks(title=TITLE, analytics_enabled=False) as app:
        gr.HTML(MASTHEAD)
        with gr.Tabs():
            with gr.Tab("1  Merge", id="merge"):
                merged = _merge_tab(actions, roots)
            with gr.Tab("2  Try it", id="try"):
                slider, expert, examples = _try_tab(actions)
            with gr.Tab("3  Calibrate", id="calibrate"):
                prompts, calibrated = _calibrate_tab(actions)
            with gr.Tab("4  Report", id="report"):
                _report_tab(actions)
            with gr.Tab("5  Save and share", id="save"):
                card = _save_tab(actions)

        def renew() -> list[Any]:
            lam = (actions.session.report and actions.session.report.lam) or 1.0
            names = actions.experts()
            ready = actions.examples()
            return [
                gr.Slider(value=lam, maximum=max(2.0, round(WIDEST * actions.own, 1))),
                gr.Dropdown(choices=names, value=names[0] if names else None),
                gr.Dataset(
                    samples=[[e.prompt] for e in ready],
                    sample_labels=[e.prompt.partition("\n")[0] for e in ready],
                    visible=bool(ready),
                ),
                actions.card(),
            ]

        shown = [slider, expert, examples, card]
        merged.then(renew, None, shown, show_progress="hidden").then(
            actions.ready_prompts, None, prompts, show_progress="hidden"
        )
        calibrated.then(renew, None, shown, show_progress="hidden")
    return app


def _merge_tab(actions: Actions, roots: Roots) -> Any:
    bases, experts = choices(roots)
    with gr.Row(equal_height=False):
        with gr.Column(scale=3, min_width=320):
            demo = gr.Button("Load the demo: five experts", elem_id="demo")
            base = gr.Dropdown(
                bases,
                value=None,
                label="Base",
                info="A folder or a Hub id",
                allow_custom_value=True,
                elem_id="base",
            )
            chosen = gr.Dropdown(
                experts,
                value=[],
                label="Experts",
                info="Models or adapters fine-tuned from that base",
                multiselect=True,
                allow_custom_value=True,
                elem_id="experts",
            )
            line = gr.Dropdown(
                [(words, name) for name, words in LINES.items()],
                value="recommended",
                label="How to merge",
                info="Recommended, or a line of the paper",
                allow_custom_value=True,
                elem_id="line",
            )
            inspect = gr.Button("Inspect", elem_id="inspect")
            merge = gr.Button("Merge", variant="primary", elem_id="merge")
            with gr.Row():
                stop = gr.Button("Stop", size="sm", min_width=80, elem_id="stop")
                discard = gr.Button("Discard", size="sm", min_width=80, elem_id="discard")
            progress = gr.HTML(elem_id="progress")
            with gr.Accordion("Models larger than memory", open=False):
                folder = gr.Textbox(
                    "",
                    label="Merge straight to a folder",
                    info="Without chat and slider; an interrupted merge resumes here, even after a crash",
                    elem_id="straight",
                )
        with gr.Column(scale=7):
            plan = gr.HTML(NOTHING_YET, elem_id="plan")
    demo.click(actions.load_demo, None, [base, chosen, progress])
    inspect.click(actions.inspect, [base, chosen, line], plan)
    stop.click(actions.stop, None, None)
    discard.click(actions.discard, None, progress)
    look = merge.click(
        lambda *given: plan_if_new(actions, *given), [base, chosen, line], plan, show_progress="hidden"
    )
    return look.then(actions.merge, folder, progress, show_progress="hidden")


def plan_if_new(actions: Actions, base: str, experts: list[str], line: str) -> Any:
    """Inspect before a merge unless this very choice was inspected; a stopped merge stays as it is."""
    session = actions.session
    if (session.job is not None and session.job.active) or session.is_inspected(base, experts, line):
        return gr.skip()
    return actions.inspect(base, experts, line)


def _try_tab(actions: Actions) -> tuple[Any, Any, Any]:
    with gr.Row(equal_height=True):
        with gr.Column(scale=3):
            slider = gr.Slider(
                0.0,
                4.0,
                value=1.0,
                step=0.05,
                label="Lambda",
                info="0 is the base; too much breaks the merge",
                buttons=[],
                elem_id="lambda",
            )
        with gr.Column(scale=2):
            expert = gr.Dropdown([], label="Compare with expert", elem_id="expert")
        with gr.Column(scale=2):
            template = gr.Checkbox(
                False,
                label="Chat template",
                info="Off: the text is continued to the end of the line",
                elem_id="chat",
            )
    with gr.Row(equal_height=True):
        question = gr.Textbox(
            "",
            label="Your question",
            lines=2,
            scale=6,
            placeholder="Ask all three models",
            elem_id="question",
        )
        ask = gr.Button("Ask", variant="primary", scale=1, min_width=120, elem_id="ask")
    examples = gr.Dataset(
        components=[gr.Textbox(visible=False)],
        samples=[],
        type="index",
        label="Or one of these, which no expert was trained on",
        visible=False,
        elem_id="examples",
    )
    said = gr.HTML(elem_id="said")
    answers = gr.HTML(NO_CHAT, elem_id="answers")
    asked = [question, expert, template]
    ask.click(actions.ask, asked, [said, answers])
    slider.change(
        lambda *given: actions.slide(*given) or (gr.skip(), gr.skip()),
        [slider, template],
        [said, answers],
        show_progress="minimal",
        trigger_mode="always_last",
    )

    def example(index: int) -> tuple[str, str]:
        chosen = actions.examples()[index]
        return chosen.prompt, chosen.expert

    examples.click(example, examples, [question, expert]).then(actions.ask, asked, [said, answers])
    return slider, expert, examples


def _calibrate_tab(actions: Actions) -> tuple[Any, Any]:
    gr.Markdown(
        "Paste a few prompts of the kind that each expert is for, without answers. Every expert answers "
        "its own; lambda and a factor per expert are fitted until the merge answers alike."
    )
    prompts = gr.Textbox(
        "",
        label="Prompts",
        info="The expert's [name], then its prompts with blank lines between them",
        lines=14,
        max_lines=24,
        elem_id="prompts",
    )
    with gr.Row(equal_height=True):
        granularity = gr.Dropdown(GRANULARITY, value="expert", label="What to fit")
        one_line = gr.Checkbox(True, label="Answers end with the line")
        calibrate = gr.Button("Calibrate", variant="primary", elem_id="calibrate")
    progress = gr.HTML(elem_id="calibration")
    fit = calibrate.click(
        actions.calibrate, [prompts, granularity, one_line], progress, show_progress="hidden"
    )
    return prompts, fit


def _report_tab(actions: Actions) -> None:
    make = gr.Button("Make the report", variant="primary", elem_id="make-report")
    page = gr.HTML(NO_PAGE, elem_id="page")
    make.click(actions.page, None, page)


def _save_tab(actions: Actions) -> Any:
    with gr.Row(equal_height=False):
        with gr.Column(scale=3):
            card = gr.Code(
                language="markdown",
                label="Model card: edit what is outside the coram markers",
                lines=24,
                max_lines=32,
                elem_id="card",
            )
        with gr.Column(scale=2):
            adapter = gr.Checkbox(
                False,
                label="As an adapter of the base",
                info="Small; its card has your text too",
                elem_id="adapter",
            )
            folder = gr.Textbox(
                "", label="Folder", info="Below the studio's root", placeholder="merged", elem_id="folder"
            )
            replace = gr.Checkbox(False, label="Replace an earlier merge")
            save = gr.Button("Save", variant="primary", elem_id="save")
            saved = gr.HTML(elem_id="saved")
            repository = gr.Textbox(
                "",
                label="Repository on the Hub",
                info="Uses the login of `hf auth login`; the studio neither asks for a token nor keeps one",
                placeholder="me/my-merge",
                elem_id="repository",
            )
            private = gr.Checkbox(True, label="Private")
            push = gr.Button("Push", elem_id="push")
            pushed = gr.HTML(elem_id="pushed")
    save.click(actions.save, [folder, card, adapter, replace], saved)
    push.click(actions.push, [repository, card, adapter, private], pushed)
    return card
