"""Do frameworks that are too heavy for the tests get through? Each against a live server.

`pip install openai-agents litellm "lm-eval[api]"`, then `python bench/clients.py` writes
results/clients.json: the version of every framework, and what it did with each model's format over
the scripted model of the tests: think, call a tool, read its result, answer. A framework that is
not installed is reported as such, and fails the run.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "clients.json"
sys.path.insert(0, str(ROOT))

from moet.bench import results  # noqa: E402
from tests.server.sdk import FORMATS, Format  # noqa: E402
from tests.server.serving import MODEL  # noqa: E402

QUESTION = "How many bolts are in stock?"
ANSWER = "There are 41."
CALL = {"item": "bolt", "depth": 2}
PARAMETERS = {
    "type": "object",
    "properties": {"item": {"type": "string"}, "depth": {"type": "integer"}},
}


def _expect(what: str, seen: object, wanted: object) -> None:
    if seen != wanted:
        raise AssertionError(f"{what} is {seen!r}; {wanted!r} was expected")


def agents(url: str, form: Format, api: str) -> list[str]:
    """openai-agents: its loop runs the tool by itself."""
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    called: list[dict[str, Any]] = []

    @function_tool
    def stock(item: str, depth: int) -> str:
        """Counts."""
        called.append({"item": item, "depth": depth})
        return json.dumps({"left": 41})

    kind = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}[api]

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            model = kind(model=MODEL, openai_client=client)
            agent = Agent(name="clerk", instructions="Count.", tools=[stock], model=model)
            result = await Runner.run(agent, QUESTION)
            _expect("the answer", result.final_output, ANSWER)
            streamed = Runner.run_streamed(agent, QUESTION)
            async for _ in streamed.stream_events():
                pass
            _expect("the streamed answer", streamed.final_output, ANSWER)

    asyncio.run(run())
    _expect("what was called", called, [CALL, CALL])
    return ["tool loop", "streamed tool loop"]


def litellm(url: str, form: Format, api: str) -> list[str]:
    """litellm as `api` has it: a call, the same streamed, and the answer to its result."""
    import litellm as lite

    lite.suppress_debug_info = True
    base = url if api == "anthropic" else f"{url}/v1"
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    function = {"name": "stock", "parameters": PARAMETERS}
    asked: Any = {
        "model": f"{api}/{MODEL}", "api_base": base, "api_key": "none", "max_tokens": 500,
        "tools": [{"type": "function", "function": function}],
    }  # fmt: skip
    if api == "anthropic":
        asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        asked["allowed_openai_params"] = ["thinking"]  # it does not know that our model thinks
        asked["max_tokens"] = 2000
    chunks = list(lite.completion(messages=history, stream=True, **asked))
    for answer in (
        lite.completion(messages=history, **asked),
        lite.stream_chunk_builder(chunks, messages=history),
    ):
        choice = answer.choices[0]
        _expect("the reason", choice.finish_reason, "tool_calls")
        [call] = choice.message.tool_calls
        _expect("the call", json.loads(call.function.arguments), CALL)
        _expect("the reasoning", choice.message.reasoning_content, "Ask.")
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"left": 41}'}
    history += [choice.message.model_dump(), result]
    last = lite.completion(messages=history, **asked)
    _expect("the answer", last.choices[0].message.content, ANSWER)
    return ["call", "streamed call", "answer"]


TASKS = {
    "shop_generate": """task: shop_generate
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 64}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "shop_choose": """task: shop_choose
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
}
SHARED = """dataset_path: json
dataset_kwargs: {{data_files: {folder}/questions.jsonl}}
test_split: train
doc_to_text: "{{{{question}}}}"
"""


def lm_eval(url: str, form: Format, api: str) -> list[str]:
    """lm-eval: generation over chat, and log-probabilities of given texts over completions.

    Every token of the scripted core has the same log-probability, so the shorter choice wins.
    """
    import lm_eval as harness
    from lm_eval.tasks import TaskManager

    task, metric, path = {
        "local-chat-completions": ("shop_generate", "exact_match,none", "chat/completions"),
        "local-completions": ("shop_choose", "acc,none", "completions"),
    }[api]
    question = {"question": "How many?", "answer": ANSWER, "choices": [ANSWER, "41"], "gold": 1}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {
            "questions.jsonl": (json.dumps(question) + "\n") * 4,
            f"{task}.yaml": TASKS[task] + SHARED.format(folder=folder),
            "tokenizer.json": form.tokenizer._full.to_str(),
            "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}),
        }.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        results = harness.simple_evaluate(
            model=api,
            model_args={
                "model": MODEL,
                "base_url": f"{url}/v1/{path}",
                "num_concurrent": 2,
                "tokenizer": folder,
                "tokenizer_backend": "huggingface",
                "max_length": 2048,
            },
            tasks=[task],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            apply_chat_template="chat" in api,
            bootstrap_iters=0,
        )
    _expect(f"{metric} of {task}", float(results["results"][task][metric]), 1.0)
    return [task]


CLIENTS: list[tuple[str, str, Callable[[str, Format, str], list[str]]]] = [
    ("openai-agents", "responses", agents),
    ("openai-agents", "chat", agents),
    ("litellm", "openai", litellm),
    ("litellm", "hosted_vllm", litellm),
    ("litellm", "anthropic", litellm),
    ("lm-eval", "local-chat-completions", lm_eval),
    ("lm-eval", "local-completions", lm_eval),
]


def try_client(
    package: str, api: str, run: Callable[[str, Format, str], list[str]], form: Format
) -> dict[str, Any]:
    """One row of the results."""
    row: dict[str, Any] = {"client": package, "api": api, "format": form.model_type}
    try:
        row["version"] = importlib.metadata.version(package)
        with form.serving() as (url, _):
            row["did"] = run(url, form, api)
    except Exception as error:
        traceback.print_exc()
        row["failed"] = f"{type(error).__name__}: {error}"[:300]
    return row


def judged(row: dict[str, Any]) -> results.Row:
    """One client as result files have it: what worked, out of nothing less than all."""
    return results.Row(
        case=f"{row['client']}, {row['api']}, {row['format']}",
        value=float("failed" not in row),
        unit="works",
        better="higher",
        target=1.0,
        note=row.get("failed") or ", ".join(row["did"]),
    )


def main() -> int:
    """Try all of them; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    os.environ["OPENAI_API_KEY"] = "none"  # lm-eval wants one
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # or it asks the network at import
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    rows = [try_client(*client, form) for form in FORMATS for client in CLIENTS]
    more = {"python": platform.python_version(), "openai": openai.__version__, "tried": rows}
    report = results.report(
        "python bench/clients.py", [judged(row) for row in rows], hardware="any", more=more
    )
    results.write(args.output, report)
    for row in rows:
        outcome = row.get("failed") or ", ".join(row["did"])
        print(f"{row['client']:14} {row['api']:22} {row['format']:12} {outcome}")
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
