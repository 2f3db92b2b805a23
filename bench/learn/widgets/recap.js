// Counts the predictions of all sections that were right at the first try.
rooflab.widget("recap", [], (root) => {
  const fields = [...document.querySelectorAll(".predict")];
  const open = () => fields.find((field) => !field.dataset.answered)?.querySelector("button").focus();
  const next = (show) => {
    document.addEventListener("predicted", show);
    return rooflab.button("Go to the next question", open);
  };
  rooflab.panel(root, {}, [next], () => {
    const answered = fields.map((field) => field.dataset.answered).filter(Boolean);
    const [right, all] = [answered.filter((word) => word === "right").length, answered.length === fields.length];
    return [`${right} of ${answered.length} right, of ${fields.length} questions.`
      + `${all ? " You have answered all of them." : ""}`];
  });
});
