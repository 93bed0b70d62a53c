// A small chat over /v1/chat/completions: content, reasoning and tool calls as they stream.
// With tools, the model may call the two below, which run in this page.

import { stream } from "./api.js";
import { element } from "./live.js";

const MAX_ROUNDS = 8; // of tool calls for one question

const TOOLS = {
  current_time: {
    description: "The current date and time.",
    parameters: { type: "object", properties: {} },
    run: () => new Date().toString(),
  },
  calculate: {
    description: "Apply an arithmetic operation to two numbers.",
    parameters: {
      type: "object",
      properties: {
        a: { type: "number" },
        operation: { type: "string", enum: ["add", "subtract", "multiply", "divide"] },
        b: { type: "number" },
      },
      required: ["a", "operation", "b"],
    },
    run: ({ a, operation, b }) => {
      const results = { add: a + b, subtract: a - b, multiply: a * b, divide: a / b };
      if (!(operation in results)) throw new Error(`operation is ${operation}`);
      return String(results[operation]);
    },
  },
};

export class Chat {
  constructor(log, options) {
    this.log = log;
    this.options = options; // () => {thinking, tools, limit}
    this.messages = [];
    this.aborter = null;
  }

  clear() {
    this.stop();
    this.messages = [];
    this.log.replaceChildren();
  }

  stop() {
    this.aborter?.abort();
  }

  async ask(text) {
    this.messages.push({ role: "user", content: text });
    const turn = this.turn("user", "you");
    turn.append(element("div", "content", text));
    this.aborter = new AbortController();
    try {
      for (let round = 0; round < MAX_ROUNDS; round++) {
        const answer = await this.answer();
        this.messages.push(answer.message);
        if (!answer.calls.length) return;
        for (const call of answer.calls) this.runTool(call);
      }
    } catch (error) {
      const stopped = error.name === "AbortError";
      this.log.append(element("p", stopped ? "note" : "error", stopped ? "stopped" : error.message));
      this.dropUnanswered();
    } finally {
      this.aborter = null;
    }
  }

  // A call whose answer is missing would make the next request invalid.
  dropUnanswered() {
    while (this.messages.length && this.messages.at(-1).role !== "user") this.messages.pop();
  }

  async answer() {
    const { thinking, tools, limit } = this.options();
    const turn = new AnswerView(this.turn("assistant", "model"));
    const body = {
      messages: this.messages,
      max_tokens: limit,
      stream: true,
      stream_options: { include_usage: true },
      timings: true,
      chat_template_kwargs: { thinking, enable_thinking: thinking },
    };
    if (tools) {
      body.tools = Object.entries(TOOLS).map(([name, { description, parameters }]) => ({
        type: "function",
        function: { name, description, parameters },
      }));
    }
    await stream("v1/chat/completions", body, (chunk) => {
      turn.add(chunk);
      this.log.scrollTop = this.log.scrollHeight;
    }, this.aborter.signal);
    return turn.finish();
  }

  runTool(call) {
    let result;
    try {
      result = TOOLS[call.function.name].run(JSON.parse(call.function.arguments || "{}"));
    } catch (error) {
      result = `error: ${error.message}`;
    }
    this.messages.push({ role: "tool", tool_call_id: call.id, content: result });
    const shown = element("details", "call");
    shown.open = true;
    shown.append(element("summary", "", `result of ${call.function.name}`), element("pre", "", result));
    this.turn("tool", "tool").append(shown);
  }

  turn(kind, who) {
    const made = element("div", `turn ${kind}`);
    made.append(element("div", "who", who));
    this.log.append(made);
    this.log.scrollTop = this.log.scrollHeight;
    return made;
  }
}

class AnswerView {
  constructor(turn) {
    this.turn = turn;
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.views = {};
  }

  add(chunk) {
    for (const { delta, finish_reason } of chunk.choices) {
      if (delta.reasoning_content) this.reason(delta.reasoning_content);
      if (delta.content) this.say(delta.content);
      for (const call of delta.tool_calls ?? []) this.call(call);
      if (finish_reason === "length") this.turn.append(element("p", "note", "cut off at the token limit"));
    }
    if (chunk.usage) this.note(chunk);
  }

  reason(text) {
    this.reasoning += text;
    this.views.reasoning ??= this.folded("reasoning", "thinking");
    this.views.reasoning.textContent = this.reasoning;
  }

  say(text) {
    this.content += text;
    if (!this.views.content) {
      this.views.content = element("div", "content");
      this.turn.append(this.views.content);
    }
    this.views.content.textContent = this.content;
  }

  call(delta) {
    let call = this.calls[delta.index];
    if (!call) {
      call = { id: delta.id, type: "function", function: { name: delta.function.name, arguments: "" } };
      this.calls[delta.index] = call;
      this.views[delta.index] = this.folded("call", `call of ${call.function.name}`);
    }
    call.function.arguments += delta.function.arguments ?? "";
    this.views[delta.index].textContent = call.function.arguments;
  }

  folded(kind, title) {
    const made = element("details", kind);
    made.open = true;
    const body = element("pre");
    made.append(element("summary", "", title), body);
    this.turn.append(made);
    return body;
  }

  note({ usage, timings }) {
    const cached = usage.prompt_tokens_details.cached_tokens;
    const speed = timings?.predicted_per_second ? `, ${timings.predicted_per_second.toFixed(1)} tok/s` : "";
    const text = `${usage.prompt_tokens} prompt tokens (${cached} cached), ${usage.completion_tokens} made${speed}`;
    this.turn.append(element("p", "note", text));
  }

  finish() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (this.calls.length) message.tool_calls = this.calls;
    return { message, calls: this.calls };
  }
}
