// Counts the predictions of all sections that were right at the first try.
rooflab.widget("recap", [], (root) => {
  const output = rooflab.status();
  const show = () => {
    const fields = [...document.querySelectorAll(".predict")];
    const answered = fields.filter((field) => field.dataset.answered);
    const right = answered.filter((field) => field.dataset.answered === "right");
    output.textContent = `${right.length} of ${answered.length} right, of ${fields.length} questions.`;
  };
  const open = () => {
    const next = [...document.querySelectorAll(".predict")].find((field) => !field.dataset.answered);
    if (next) next.querySelector("button").focus();
    else output.textContent += " You have answered all of them.";
  };
  document.addEventListener("predicted", show);
  root.append(rooflab.el("p", {}, output), rooflab.button("Go to the next question", open));
  show();
});
