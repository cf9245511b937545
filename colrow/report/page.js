// The page is complete without this: it only switches the direction of the diagram and filters the table.
document.querySelectorAll(".switch button").forEach((button) =>
  button.addEventListener("click", () => {
    button.closest("[data-way]").dataset.way = button.value;
    button.parentNode.querySelectorAll("button").forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
  }),
);
document.querySelectorAll("input.search").forEach((input) =>
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    document.querySelectorAll("table.parameters tbody tr").forEach((row) => {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    });
  }),
);
