// What is known of a checkpoint beside its variables, in place of what a plan says of memory.

function checkpointView(holder, panel) {
  panel.hidden = false;
  byId("memory-panel").hidden = true;
  holder.append(make("dl", { class: "facts" }, data.checkpoint.facts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)])));
}
