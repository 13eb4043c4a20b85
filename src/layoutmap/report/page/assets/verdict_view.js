// The verdict on the plan, as the terminal and the exit code have it: it stands first, and nothing is decided here.

function verdictView(holder, panel) {
  const { verdict } = data;
  panel.hidden = false;
  panel.classList.add(verdict.mood);
  const parts = verdict.because.map(([what, bytes]) => `${sizeText(bytes)}  ${what}`).join("\n");
  const facts = [["because of", parts], ["try", verdict.advice.join("\n")]].filter(([, text]) => text && verdict.fits === false);
  holder.append(
    make("p", { id: "headline" }, verdict.says),
    make("dl", { class: "facts" }, facts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)])));
}
