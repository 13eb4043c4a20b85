// The verdict on the plan, as the terminal and the exit code have it: it stands first, and nothing is decided here.

function verdictView(holder, panel) {
  const { verdict } = data;
  panel.hidden = false;
  panel.classList.add(verdict.mood);
  const parts = verdict.because.map(([what, bytes]) => `${sizeText(bytes)}  ${what}`).join("\n");
  const untried = verdict.untried.length ? `${verdict.untried.join(", ")}: counting them takes too long` : "";
  const facts = [["because of", parts], ["not tried", untried]].filter(([, text]) => text && verdict.fits === false);
  const advice = verdict.advice.map(([what, ...ways]) => make("li", {}, what, ways.map((way) => make("code", {}, way))));
  holder.append(
    make("p", { id: "headline" }, verdict.says),
    make("dl", { class: "facts" }, facts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)])));
  if (advice.length) holder.append(make("h3", {}, "What would help"), make("ol", { class: "advice" }, advice));
}
