// Builds the page.

startTheme();
buildAnswer();
buildMap();
buildLanes();
buildRace();
choose(Math.max(0, places.findIndex(isDraft)));
document.documentElement.dataset.ready = "true";
