"use strict";
// Filters, the search in the answers, and what a mark says under the pointer. Texts go in as text, never as markup.
(() => {
  const form = document.querySelector(".filters");
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const picks = () => Object.fromEntries(all("select[data-picks]").map((s) => [s.dataset.picks, s.value]));
  const filtered = all("main [data-protocol], main [data-p], main [data-pick]");
  const answers = JSON.parse(document.getElementById("predictions").textContent);
  const list = document.getElementById("list");
  const familyOf = Object.fromEntries(all("option[data-f]", form).map((o) => [o.value.slice(1), o.dataset.f]));
  const PAGE = 20;
  let shown = PAGE;

  const state = () => {
    const task = form.elements.task.value;
    return {
      protocol: form.elements.protocol.value,
      task: task[0] === "t" ? task.slice(1) : "",
      family: task[0] === "f" ? task.slice(1) : task[0] === "t" ? familyOf[task.slice(1)] : "",
      policies: new Set(all("input[name=policy]:checked", form).map((box) => box.value)),
    };
  };

  // What an element does not say, it is not filtered by. What is over all tasks has an empty data-f.
  const fits = (data, at, pick) =>
    (!at.protocol || data.protocol === undefined || data.protocol === at.protocol) &&
    (!at.family || data.f === undefined || data.f === at.family) &&
    (!at.task || data.t === undefined || data.t === at.task) &&
    (data.p === undefined || at.policies.has(data.p)) &&
    (pick === undefined || data.pick === undefined || data.pick === "" || data.pick === pick);

  const apply = () => {
    const at = state();
    const picked = picks();
    for (const element of filtered) {
      const section = element.closest("section").id;
      element.classList.toggle("off", !fits(element.dataset, at, picked[section]));
    }
    for (const body of all("tbody[data-protocol]")) {
      if (!body.querySelector("tr[data-p]:not(.off)")) body.classList.add("off");
    }
    const rows = all("#tasks tr[data-p]");
    const visible = rows.filter((row) => !row.classList.contains("off") && !row.parentNode.classList.contains("off"));
    document.querySelector(".empty").classList.toggle("off", visible.length > 0);
    form.querySelector("output").textContent =
      `${at.policies.size} of ${form.elements.policy.length ?? 1} policies, ${visible.length} table rows`;
    shown = PAGE;
    search();
  };

  const part = (name, text, root, kind = "dd") => {
    if (name) root.append(Object.assign(document.createElement("dt"), { textContent: name }));
    const element = Object.assign(document.createElement(kind), { textContent: text });
    if (kind === "dd") element.dir = "auto";
    root.append(element);
  };

  const show = (answer) => {
    const article = document.createElement("article");
    article.className = "answer";
    part("", answer.head, article, "h3");
    const score = answer.score === null ? "no score" : `score ${answer.score.toFixed(2)}`;
    part("", `${answer.sample}, ${score}`, article, "p");
    article.lastChild.className = "small";
    const texts = document.createElement("dl");
    part("Question", answer.question, texts);
    part("Reference", answer.references.join("\n"), texts);
    part("Prediction", answer.prediction || "(empty)", texts);
    article.append(texts);
    return article;
  };

  const search = () => {
    if (!list) return;
    const at = state();
    const words = document.getElementById("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = answers.filter((a) => {
      const data = { protocol: a.protocol, t: String(a.t), f: familyOf[a.t], p: String(a.p) };
      if (!fits(data, at)) return false;
      const text = [a.head, a.sample, a.question, a.prediction, ...a.references].join("\n").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    list.replaceChildren(...found.slice(0, shown).map(show));
    document.getElementById("found").textContent = `${Math.min(shown, found.length)} of ${found.length} shown`;
    document.getElementById("more").classList.toggle("off", found.length <= shown);
  };

  form.addEventListener("change", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const select of all("select[data-picks]")) select.addEventListener("change", apply);
  for (const button of all("button[data-all]")) {
    button.addEventListener("click", () => {
      for (const box of all("input[name=policy]", form)) box.checked = Boolean(button.dataset.all);
      apply();
    });
  }
  document.getElementById("search")?.addEventListener("input", () => { shown = PAGE; search(); });
  document.getElementById("more")?.addEventListener("click", () => { shown += PAGE; search(); });

  const tip = document.getElementById("tip");
  const point = (event) => {
    const mark = event.target.closest?.(".mark path[aria-label]");
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.getAttribute("aria-label");
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 4))}px`;
    tip.style.top = `${event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 16}px`;
  };
  document.addEventListener("pointerover", point);
  document.addEventListener("pointerdown", point);

  if (matchMedia("(max-width: 600px)").matches) form.querySelector("details").open = false;
  apply();
})();
