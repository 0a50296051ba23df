// Fetches the page's live part anew every two seconds. Without JavaScript the page is the same, as of its loading.
"use strict";
const live = document.getElementById("live");
async function refresh() {
  try {
    // Not while somebody is about to press a button: it must not move away.
    if (!document.hidden && !live.matches(":focus-within")) {
      const answer = await fetch(live.dataset.source, { credentials: "same-origin" });
      if (answer.ok) live.innerHTML = await answer.text();
    }
  } catch { /* the server restarts: try again */ }
  setTimeout(refresh, 2000);
}
setTimeout(refresh, 2000);
