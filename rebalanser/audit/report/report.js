"use strict";
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const narrow = matchMedia("(max-width: 640px)");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const settings = {
    displaylogo: false,
    responsive: true,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };
  const root = document.documentElement;

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function themed(layout) {
    const ink = colour("--ink"), grid = colour("--grid"), line = colour("--line"), panel = colour("--panel");
    const look = {
      ...layout,
      font: { ...layout.font, color: ink },
      hoverlabel: { ...layout.hoverlabel, bgcolor: panel, bordercolor: line, font: { color: ink } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--muted"), activecolor: colour("--link") },
    };
    for (const name of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
      look[name] = { ...layout[name], gridcolor: grid, linecolor: line, tickcolor: line };
    }
    if (narrow.matches) {
      look.font.size = 10;
      look.dragmode = false;
      look.margin = { ...layout.margin, l: 40, r: 4 };
      if (look.xaxis.type === "date") look.xaxis.nticks = 4;
      if (layout.meta) look.yaxis.ticktext = layout.meta.short;
    }
    return look;
  }

  function elements() {
    return [...document.querySelectorAll(".plot")];
  }

  async function draw() {
    for (const element of elements()) {
      const { data, layout } = plots[Number(element.dataset.plot)];
      await Plotly.react(element, data, themed(layout), settings);
    }
    root.dataset.drawn = "yes";
  }

  function openAll() {
    for (const details of document.querySelectorAll("details")) details.open = true;
  }

  function openTarget() {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  }

  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  addEventListener("beforeprint", openAll);
  addEventListener("hashchange", openTarget);
  openTarget();
  draw();
})();
