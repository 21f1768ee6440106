//! A plot as SVG: for times, which share of all took no longer. Text only, so that nothing has to be installed.

use std::fmt::Write;
use std::time::Duration;

/// One plot beside others.
pub(crate) struct Panel<'a> {
    pub(crate) title: &'a str,
    /// Name and times of each line; one without times is left out. Up to four are told apart.
    pub(crate) lines: Vec<(&'a str, Vec<Duration>)>,
}

/// The panels side by side under a heading, with one legend: lines of the same index are the same thing in all of them.
pub(crate) fn svg(heading: &str, panels: &[Panel<'_>]) -> String {
    let width = (panels.len() as f64).mul_add(PANEL + GAP, GAP);
    let height = TOP + HEIGHT + BOTTOM;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    text(&mut out, GAP, 24.0, "start", &format!("<tspan font-size=\"16\">{}</tspan>", escaped(heading)));
    let names = panels.first().map(|p| p.lines.iter().map(|l| l.0));
    for (k, name) in names.into_iter().flatten().enumerate() {
        let (x, y) = (GAP + 170.0 * k as f64, 50.0);
        line(&mut out, &format!("{x},{y} {},{y}", x + 34.0), k);
        text(&mut out, x + 42.0, y + 4.0, "start", &escaped(name));
    }
    for (k, panel) in panels.iter().enumerate() {
        panel.draw(&mut out, (k as f64).mul_add(PANEL + GAP, GAP));
    }
    out + "</svg>\n"
}

impl Panel<'_> {
    fn draw(&self, out: &mut String, left: f64) {
        let all = || self.lines.iter().flat_map(|(_, times)| times.iter().map(|t| t.as_secs_f64().max(SHORTEST)));
        let low = all().fold(f64::INFINITY, f64::min);
        let (low, high) = if low.is_finite() { (low, all().fold(low, f64::max)) } else { (0.1, 1.0) };
        // Whole powers of ten, one at least.
        let first = low.log10().floor();
        let last = high.log10().ceil().max(first + 1.0);
        let x = |seconds: f64| left + PANEL * (seconds.max(SHORTEST).log10() - first) / (last - first);
        let y = |share: f64| TOP + HEIGHT * (1.0 - share);

        text(out, left + PANEL / 2.0, TOP - 12.0, "middle", &escaped(self.title));
        for percent in [0, 25, 50, 75, 100] {
            let y = y(f64::from(percent) / 100.0);
            grid(out, left, y, left + PANEL, y);
            text(out, left - 6.0, y + 4.0, "end", &format!("{percent} %"));
        }
        for power in first as i32..=last as i32 {
            let at = x(10f64.powi(power));
            grid(out, at, TOP, at, TOP + HEIGHT);
            text(out, at, TOP + HEIGHT + 18.0, "middle", &label(power));
        }
        text(out, left + PANEL / 2.0, TOP + HEIGHT + 40.0, "middle", "time, logarithmic");
        let (across, up) = (left - 56.0, TOP + HEIGHT / 2.0);
        let _ = writeln!(
            out,
            "<text transform=\"translate({across:.1} {up:.1}) rotate(-90)\" text-anchor=\"middle\">share that took no longer</text>"
        );
        for (k, (_, times)) in self.lines.iter().enumerate().filter(|(_, l)| !l.1.is_empty()) {
            let mut times = times.clone();
            times.sort_unstable();
            // Steps, one for each time; of many, as many as can be seen.
            let n = times.len();
            let every = n.div_ceil(MOST_STEPS);
            let mut points = String::new();
            let mut share = 0.0;
            for i in (0..n).filter(|i| i % every == every - 1 || i + 1 == n) {
                let at = x(times[i].as_secs_f64());
                let _ = write!(points, "{at:.1},{:.1} ", y(share));
                share = (i + 1) as f64 / n as f64;
                let _ = write!(points, "{at:.1},{:.1} ", y(share));
            }
            line(out, points.trim_end(), k);
        }
    }
}

fn label(power: i32) -> String {
    match power {
        ..-3 => format!("{} µs", 10f64.powi(power + 6)),
        -3..0 => format!("{} ms", 10f64.powi(power + 3).round()),
        0.. => format!("{} s", 10f64.powi(power)),
    }
}

fn line(out: &mut String, points: &str, k: usize) {
    let (color, dashes) = STYLES[k % STYLES.len()];
    let _ = writeln!(
        out,
        "<polyline points=\"{points}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" stroke-dasharray=\"{dashes}\"/>"
    );
}

fn grid(out: &mut String, x1: f64, y1: f64, x2: f64, y2: f64) {
    let _ = writeln!(out, "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#cccccc\"/>");
}

/// `content` is markup.
fn text(out: &mut String, x: f64, y: f64, anchor: &str, content: &str) {
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{content}</text>");
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// Told apart by those who see few colours, and on paper.
const STYLES: [(&str, &str); 4] = [("#d55e00", "7 4"), ("#0072b2", "2 3"), ("#009e73", "none"), ("#555555", "12 4 2 4")];
const PANEL: f64 = 420.0;
const HEIGHT: f64 = 280.0;
const GAP: f64 = 80.0;
const TOP: f64 = 100.0;
const BOTTOM: f64 = 56.0;
const MOST_STEPS: usize = 500;
/// Nothing is shorter: a logarithm needs something to start from.
const SHORTEST: f64 = 1e-6;
