"use strict";
// Shows samples of a run. All text of the model goes through textContent, so that none of it is
// read as HTML.
(() => {
  const data = JSON.parse(document.getElementById("samples-data").textContent);
  const FIELD = Object.fromEntries(data.group_fields.map((name, place) => [name, place]));
  const samples = data.samples;
  const state = { place: samples.length - 1, group: 0, left: null, right: null };
  const $ = (id) => document.getElementById(id);

  // Writes out what nobody would see, or what turns a line around: U+202E as ⟨U+202E⟩
  function visible(text) {
    return String(text).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (sign) => {
      if (sign === "\n" || sign === "\t") return sign;
      return `⟨U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
    });
  }

  function make(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = visible(text);
    return node;
  }

  function number(value, digits = 4) {
    if (value === null || value === undefined) return "–";
    return String(Number(value.toPrecision(digits)));
  }

  // [[value, count], ...] as one value a token
  function spread(runs) {
    const values = [];
    for (const [value, count] of runs) {
      for (let i = 0; i < count; i++) values.push(value);
    }
    return values;
  }

  // --- Colours: how a token's number becomes a background that text is readable on ---

  function signed(value, most) {
    if (value === null || !most) return "";
    const strength = Math.min(1, Math.abs(value) / most) * 0.6;
    return value < 0 ? `rgba(214, 70, 50, ${strength})` : `rgba(40, 140, 90, ${strength})`;
  }

  function rising(value, most) {
    if (value === null || !most) return "";
    return `rgba(220, 140, 20, ${Math.min(1, value / most) * 0.65})`;
  }

  const COLOURS = {
    role: {
      name: "trained or context",
      of: (token) => (token.role === "trained" ? 1 : token.role === "sampled" ? 0.4 : null),
      paint: (value) => (value === null ? "" : `rgba(60, 120, 220, ${value * 0.35})`),
      legend: () => [["rgba(60, 120, 220, .35)", "trained"], ["rgba(60, 120, 220, .14)", "sampled, nothing learned"], ["transparent", "context"]],
    },
    lag: {
      name: "lag",
      of: (token) => (token.sampled ? token.lag : null),
      paint: rising,
      legend: (most) => [["transparent", "0 steps"], [rising(1, 1), `${number(most)} steps`]],
    },
    gap: {
      name: "logprob gap, trainer − generator",
      of: (token) => (token.trainer === null || token.generator === null ? null : token.trainer - token.generator),
      paint: signed,
      legend: (most) => [[signed(-1, 1), `−${number(most)} nats`], ["transparent", "0"], [signed(1, 1), `+${number(most)} nats`]],
    },
    advantage: {
      name: "advantage",
      of: (token) => (token.sampled ? token.advantage : null),
      paint: signed,
      legend: (most) => [[signed(-1, 1), `−${number(most)}`], ["transparent", "0"], [signed(1, 1), `+${number(most)}`]],
    },
    surprise: {
      name: "surprise, −generator logprob",
      of: (token) => (token.generator === null ? null : -token.generator),
      paint: rising,
      legend: (most) => [["transparent", "0 nats"], [rising(1, 1), `${number(most)} nats`]],
    },
  };

  function tokensOf(completion) {
    const lags = spread(completion.lag);
    const sampled = spread(completion.sampled);
    const advantages = spread(completion.advantage);
    const rewards = spread(completion.turn_reward);
    return completion.ids.map((id, i) => {
      const advantage = advantages.length ? advantages[i] : null;
      const learns = sampled[i] && completion.trained && advantage !== 0 && advantage !== null;
      return {
        id, text: completion.text[i], lag: lags[i], sampled: sampled[i], advantage,
        generator: completion.generator[i], trainer: completion.trainer[i],
        turnReward: rewards[i],
        role: learns ? "trained" : sampled[i] ? "sampled" : "context",
      };
    });
  }

  function shownText(text) {
    if (text === "") return "·";
    return text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥");
  }

  function told(token) {
    const words = [`token ${token.id}`, token.role, `lag ${token.lag}`];
    if (token.sampled) {
      words.push(`generator ${number(token.generator)}`, `trainer ${number(token.trainer)}`);
      const gap = COLOURS.gap.of(token);
      if (gap !== null) words.push(`gap ${number(gap, 2)}`);
      words.push(`advantage ${number(token.advantage)}`);
      if (token.turnReward) words.push(`reward of its turn ${number(token.turnReward)}`);
    }
    return words.join("   ");
  }

  // --- Filters ---

  function limits() {
    const low = $("reward-low").value;
    const high = $("reward-high").value;
    return [low === "" ? -Infinity : Number(low), high === "" ? Infinity : Number(high)];
  }

  function fits(group) {
    const kind = $("taught").value;
    if (kind === "taught" && !group.taught) return false;
    if (kind === "not" && group.taught) return false;
    const [low, high] = limits();
    const isBounded = low !== -Infinity || high !== Infinity;
    if (isBounded && !group.completions.some((c) => c.reward !== null && c.reward >= low && c.reward <= high)) return false;
    const wanted = $("search").value.toLowerCase();
    if (!wanted) return true;
    const texts = [group.prompt, ...group.completions.map((c) => c.text.join(""))];
    return texts.some((text) => text.toLowerCase().includes(wanted));
  }

  function places() {
    const found = [];
    const first = Number($("step-first").value || -Infinity);
    const last = $("step-last").value === "" ? Infinity : Number($("step-last").value);
    samples.forEach((sample, place) => {
      if (sample.step < first || sample.step > last) return;
      if (sample.shown.some(fits)) found.push(place);
    });
    return found;
  }

  // --- Drawing ---

  function extremes(completions) {
    let best = null;
    let worst = null;
    completions.forEach((completion, place) => {
      if (completion.reward === null || !completion.ids.length) return;
      if (best === null || completion.reward > completions[best].reward) best = place;
      if (worst === null || completion.reward < completions[worst].reward) worst = place;
    });
    if (best === null && completions.length) return [0, Math.min(1, completions.length - 1)];
    // Of equal rewards two different ones are shown.
    if (best === worst && completions.length > 1) worst = best === completions.length - 1 ? 0 : completions.length - 1;
    return [best, worst];
  }

  function drawCompletion(completion, place, name, scale, colour) {
    const box = make("div", "completion");
    const reward = completion.reward === null ? `no reward (${completion.outcome})` : `reward ${number(completion.reward)}`;
    box.append(make("h4", "", `${name}: completion ${place + 1}, ${reward}`));
    const facts = [`${completion.length} tokens, ended by ${completion.finish}`];
    if (completion.shaped !== null && completion.shaped !== completion.reward) facts.push(`shaped ${number(completion.shaped)}`);
    for (const [part, value] of Object.entries(completion.parts)) facts.push(`${part} ${number(value)}`);
    if (completion.left_out) facts.push(`${completion.left_out} tokens are not kept`);
    box.append(make("div", "quiet", facts.join(" · ")));
    const tokens = tokensOf(completion);
    const body = make("div", "tokens");
    body.tabIndex = 0;
    body.setAttribute("role", "group");
    body.setAttribute("aria-label", `tokens of completion ${place + 1}; arrow keys move`);
    const detail = make("div", "detail quiet", "");
    detail.setAttribute("aria-live", "polite");
    const spans = [];
    let turn = null;
    let numTurns = 0;
    tokens.forEach((token, i) => {
      if (turn === null || token.sampled !== tokens[i - 1].sampled) {
        turn = make("div", token.sampled ? "turn" : "turn context");
        if (token.sampled) numTurns += 1;
        const isCall = token.sampled && tokens.slice(i).some((later) => !later.sampled);
        const label = token.sampled ? `turn ${numTurns}${isCall ? ", answered by the environment" : ""}` : "environment";
        turn.append(make("span", "quiet", label));
        body.append(turn);
      }
      const span = make("span", "token", shownText(token.text));
      span.style.backgroundColor = colour.paint(colour.of(token), scale);
      span.title = told(token);
      span.addEventListener("click", () => select(i));
      spans.push(span);
      turn.append(span);
    });
    if (numTurns === 1 && spans.length && tokens.every((token) => token.sampled)) turn.firstChild.remove();
    let current = -1;
    function select(i) {
      if (!spans.length) return;
      if (current >= 0) spans[current].classList.remove("current");
      current = Math.max(0, Math.min(spans.length - 1, i));
      spans[current].classList.add("current");
      spans[current].scrollIntoView({ block: "nearest" });
      detail.textContent = told(tokens[current]);
    }
    body.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: spans.length - 1 };
      if (!(event.key in moves)) return;
      event.preventDefault();
      event.stopPropagation();
      select(moves[event.key]);
    });
    if (!tokens.length) body.append(make("span", "quiet", completion.length ? "its tokens are not kept" : "it has no tokens"));
    box.append(body, detail);
    return box;
  }

  function drawGroups(sample) {
    const chips = $("groups");
    chips.replaceChildren();
    const most = Math.max(...sample.groups.map((line) => Math.abs(line[FIELD.mean] ?? 0)), 1e-9);
    let taught = 0;
    for (const line of sample.groups) {
      const chip = line[FIELD.taught] ? make("span", "chip") : make("span", "chip equal", "=");
      chip.style.backgroundColor = signed(line[FIELD.mean], most);
      chip.title = `ticket ${line[FIELD.ticket]}: rewards ${number(line[FIELD.least])} to ${number(line[FIELD.most])}, mean ${number(line[FIELD.mean])}; ` +
        `${line[FIELD.trained]} completions trained on, lag ${line[FIELD.lag]}; ${line[FIELD.taught] ? "taught" : "nothing to learn"}`;
      if (line[FIELD.taught]) taught += 1;
      chips.append(chip);
    }
    $("groups-note").textContent = `${taught} of ${sample.groups.length} groups of the trainer's first rank taught; the others (=) had no advantage. ` +
      "Colour: mean reward. Each tells its figures when pointed at.";
  }

  function drawGroup(sample) {
    const groups = sample.shown.filter(fits);
    state.group = Math.min(state.group, Math.max(0, groups.length - 1));
    const names = $("group-buttons");
    names.replaceChildren();
    groups.forEach((group, place) => {
      const button = make("button", "", `ticket ${group.ticket}${group.taught ? "" : " (nothing to learn)"}`);
      button.setAttribute("aria-pressed", String(place === state.group));
      button.addEventListener("click", () => { state.group = place; state.left = state.right = null; draw(); });
      names.append(button);
    });
    const group = groups[state.group];
    const main = $("group");
    main.replaceChildren();
    $("legend").replaceChildren();
    if (!group) return;
    main.append(make("div", "prompt", group.prompt));
    const [best, worst] = extremes(group.completions);
    const left = state.left ?? best;
    const right = state.right ?? worst;
    const picks = make("div", "controls");
    picks.append(make("span", "quiet", "compare with:"));
    group.completions.forEach((completion, place) => {
      const button = make("button", "", `${place + 1}: ${number(completion.reward)}`);
      button.setAttribute("aria-pressed", String(place === right));
      button.title = "put it on the right; with Shift on the left";
      button.addEventListener("click", (event) => {
        if (event.shiftKey) state.left = place;
        else state.right = place;
        draw();
      });
      picks.append(button);
    });
    const colour = COLOURS[$("colour").value];
    const shown = [...new Set([left, right])];
    let scale = 0;
    for (const place of shown) {
      for (const token of tokensOf(group.completions[place])) {
        scale = Math.max(scale, Math.abs(colour.of(token) ?? 0));
      }
    }
    for (const [paint, label] of colour.legend(scale)) {
      const key = make("span", "key");
      const swatch = make("span", "swatch");
      swatch.style.backgroundColor = paint;
      key.append(swatch, make("span", "", label));
      $("legend").append(key);
    }
    const pair = make("div", "pair");
    for (const place of shown) {
      const name = place === best ? "best" : place === worst ? "worst" : "another";
      pair.append(drawCompletion(group.completions[place], place, name, scale, colour));
    }
    main.append(picks, pair);
  }

  function draw() {
    const found = places();
    const note = $("samples-note");
    if (!found.length) {
      note.textContent = "No kept group fits these filters.";
      for (const id of ["groups", "group", "group-buttons", "legend"]) $(id).replaceChildren();
      $("groups-note").textContent = "";
      return;
    }
    if (!found.includes(state.place)) {
      state.place = found.reduce((near, place) => (Math.abs(place - state.place) < Math.abs(near - state.place) ? place : near));
    }
    const sample = samples[state.place];
    $("step").value = String(found.indexOf(state.place));
    $("step").max = String(found.length - 1);
    note.textContent = `step ${sample.step}, ${found.indexOf(state.place) + 1} of ${found.length} that fit`;
    drawGroups(sample);
    drawGroup(sample);
  }

  function move(by) {
    const found = places();
    const at = found.indexOf(state.place) + by;
    if (at < 0 || at >= found.length) return;
    state.place = found[at];
    state.group = 0;
    state.left = state.right = null;
    draw();
  }

  function moveGroup(by) {
    const groups = samples[state.place].shown.filter(fits);
    state.group = (state.group + by + groups.length) % Math.max(1, groups.length);
    state.left = state.right = null;
    draw();
  }

  // --- What the user does ---

  for (const [key, colour] of Object.entries(COLOURS)) {
    const option = make("option", "", colour.name);
    option.value = key;
    $("colour").append(option);
  }
  function restart() {
    state.left = state.right = null;
    state.group = 0;
    draw();
  }
  for (const id of ["taught", "reward-low", "reward-high", "search", "step-first", "step-last"]) {
    $(id).addEventListener("input", restart);
  }
  $("colour").addEventListener("input", draw);
  $("step").addEventListener("input", () => {
    state.place = places()[Number($("step").value)];
    restart();
  });
  $("previous").addEventListener("click", () => move(-1));
  $("next").addEventListener("click", () => move(1));
  const KEYS = {
    j: () => move(1),
    k: () => move(-1),
    g: () => moveGroup(1),
    c: () => {
      $("colour").selectedIndex = ($("colour").selectedIndex + 1) % $("colour").options.length;
      draw();
    },
    "/": () => $("search").focus(),
  };
  document.addEventListener("keydown", (event) => {
    const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
    if (isTyping && event.key === "Escape") event.target.blur();
    if (isTyping || event.ctrlKey || event.altKey || event.metaKey || !(event.key in KEYS)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  // A link may say what is shown: #step=12&colour=lag&taught=taught
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const id of ["colour", "taught", "reward-low", "reward-high", "search", "step-first", "step-last"]) {
    if (wanted.has(id)) $(id).value = wanted.get(id);
  }
  if ($("colour").selectedIndex < 0) $("colour").selectedIndex = 0; // the link names no colouring
  if (wanted.has("step")) {
    const near = samples.findIndex((sample) => sample.step >= Number(wanted.get("step")));
    if (near >= 0) state.place = near;
  }
  draw();
})();
