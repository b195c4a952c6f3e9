// Which parts of the page are shown: the list of conversations, the chat, the view of the engine.

import { byId } from "./dom.js";
import { keepSetting, setting } from "./store.js";

const narrow = matchMedia("(max-width: 1100px)");  // as in the style sheets
const wide = matchMedia("(min-width: 1440px)");
const bodyClasses = document.body.classList;  // the style sheets place the parts by them
let engineShown = () => {};

/** Show the parts that the address and the width ask for, and follow both.  listener: gets whether the engine is shown. */
export function arrange(listener) {
  engineShown = listener;
  byId("sidebar-toggle").addEventListener("click", () => showSidebar(!sidebarShown()));
  byId("backdrop").addEventListener("click", () => showSidebar(false));
  byId("engine-toggle").addEventListener("click", () => {
    chooseEngine(true);
    byId("engine-close").focus();  // it takes the place of this button
  });
  byId("engine-close").addEventListener("click", () => {
    chooseEngine(false);
    if (location.hash === "#engine") {
      location.hash = "";
      followAddress();  // at once: a hidden button takes no focus
    }
    byId("engine-toggle").focus();
  });
  addEventListener("hashchange", followAddress);
  for (const width of [narrow, wide]) width.addEventListener("change", followAddress);
  followAddress();
}

/** /#engine shows the engine alone. */
function followAddress() {
  const alone = location.hash === "#engine";
  bodyClasses.toggle("engine-alone", alone);
  const link = byId("engine-alone");
  link.setAttribute("href", alone ? "#" : "#engine");
  link.title = alone ? "Show the chat too" : "Show the engine alone";
  link.setAttribute("aria-label", link.title);
  showEngine(alone || (!narrow.matches && setting("engine", wide.matches)));
}

/** Show or hide the engine, and remember the user's choice. */
function chooseEngine(shown) {
  if (!narrow.matches) keepSetting("engine", shown);
  showEngine(shown);
}

function showEngine(shown) {
  bodyClasses.toggle("show-engine", shown);
  bodyClasses.toggle("drawer", narrow.matches || (shown && !wide.matches));
  engineShown(shown);
  disableCovered();
}

export const sidebarShown = () => bodyClasses.contains("show-sidebar");

/** Show or hide the list of conversations, where it is a drawer. */
export function showSidebar(shown) {
  const leaves = !shown && byId("sidebar").contains(document.activeElement);
  bodyClasses.toggle("show-sidebar", shown);
  byId("sidebar-toggle").setAttribute("aria-expanded", String(shown));
  disableCovered();
  if (shown) byId("new").focus();
  else if (leaves && bodyClasses.contains("drawer")) byId("sidebar-toggle").focus();
}

/** The keyboard cannot reach a part that another one covers. */
function disableCovered() {
  const drawer = bodyClasses.contains("drawer") && sidebarShown();
  byId("engine").inert = drawer;
  byId("chat").inert = drawer || (bodyClasses.contains("show-engine") && narrow.matches);
}
