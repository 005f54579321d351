//! The timeline as a picture: one lane for each pod, a bar for every 100 ms.

use std::fmt::Write as _;

use super::document::{Act, Check, Document, Event, EventKind, Lane, Scene};

const WIDTH: f64 = 1200.0;
const MARGIN: f64 = 24.0;
/// Names of lanes stand left of this.
const LEFT: f64 = 150.0;
const RIGHT: f64 = WIDTH - MARGIN;
const LANE: f64 = 44.0;
const GAP: f64 = 6.0;
const BAND: f64 = 26.0;
/// Numbers of events, between band and lanes.
const RAIL: f64 = 34.0;
const AXIS: f64 = 34.0;
const LINE: f64 = 17.0;
/// Two numbers of events are at least this far apart.
const APART: f64 = 20.0;
/// Characters of a line in one of the two columns below a timeline.
const COLUMN: usize = 88;

const STYLE: &str = "\
text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2933}\
.head{font-size:20px;font-weight:600}.title{font-size:15px;font-weight:600}.soft{fill:#616e7c}\
.strong{font-weight:600}.small{font-size:11px}.on{fill:#fff;font-weight:600;font-size:11px}\
.good{fill:#2f855a}.bad{fill:#c53030}";

/// Draws what was found.
#[must_use]
pub fn draw(document: &Document) -> String {
    let mut body = String::new();
    let mut y = MARGIN + 18.0;
    text(
        &mut body,
        MARGIN,
        y,
        "head",
        "start",
        "A FoU flow and its egress pods, without and with coil-guard",
    );
    y += 20.0;
    let about = format!(
        "Model of Cilium {} ({}), ClientIP affinity. Bars: packets that arrived in {} ms.",
        document.cilium, document.attached, document.bin_ms
    );
    text(&mut body, MARGIN, y, "soft", "start", &about);
    legend(&mut body, y);
    y += 22.0;
    for scene in &document.scenes {
        y = draw_scene(&mut body, scene, document.bin_ms as f64, y);
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {y}\" width=\"{WIDTH}\" height=\"{y}\" role=\"img\" \
         aria-label=\"Timeline of the demonstration\">\n<style>{STYLE}</style>\n<rect width=\"100%\" height=\"100%\" \
         fill=\"#fff\"/>\n{body}</svg>\n"
    )
}

fn legend(out: &mut String, y: f64) {
    let mut x = RIGHT - 630.0;
    for (fill, name, width) in [
        (GOOD, "on a live pod", 115.0),
        (BAD, "on a Terminating pod", 160.0),
        (STAYS, "kept there by drain", 155.0),
        (LEAVING, "pod Terminating", 125.0),
        (GONE, "gone", 60.0),
    ] {
        rect(out, x, y - 10.0, 12.0, 12.0, fill);
        text(out, x + 17.0, y, "soft", "start", name);
        x += width;
    }
}

const GOOD: &str = "#38a169";
const BAD: &str = "#e53e3e";
const STAYS: &str = "#dd9a1f";
const LEAVING: &str = "#fed7d7";
const GONE: &str = "#cbd2d9";
const EMPTY: &str = "#f5f7fa";

/// Draws a scene from `top` on and says where it ends.
fn draw_scene(out: &mut String, scene: &Scene, bin: f64, top: f64) -> f64 {
    let scale = (RIGHT - LEFT) / scene.length_ms.max(1.0);
    let x = |at: f64| LEFT + at.clamp(0.0, scene.length_ms) * scale;
    let mut y = top + 18.0;
    text(out, MARGIN, y, "title", "start", &scene.title);
    y += 10.0;
    for (index, act) in scene.acts.iter().enumerate() {
        let fill = if index % 2 == 0 { "#d9e2ec" } else { "#bcccdc" };
        rect(out, x(act.from_ms), y, x(act.to_ms) - x(act.from_ms), BAND, fill);
        text(out, x(act.from_ms) + 8.0, y + 17.5, "strong", "start", &act.title);
    }
    y += BAND;
    let rail = y + RAIL / 2.0 - 2.0;
    y += RAIL;
    let lanes_top = y;
    for lane in &scene.lanes {
        draw_lane(out, scene, lane, (bin, &x), y);
        y += LANE + GAP;
    }
    let numbered: Vec<&Event> = scene.events.iter().filter(|event| event.kind != EventKind::Act).collect();
    draw_events(out, &numbered, &x, (rail, lanes_top, y));
    draw_axis(out, scene.length_ms, &x, y);
    y += AXIS;
    let left = list_events(out, &numbered, y);
    let right = list_checks(out, &scene.acts, y);
    left.max(right) + 12.0
}

fn draw_lane(out: &mut String, scene: &Scene, lane: &Lane, (bin, x): (f64, &impl Fn(f64) -> f64), y: f64) {
    let same_flows = |other: &&Lane| other.flows == lane.flows;
    let counts = scene.lanes.iter().filter(same_flows).flat_map(|lane| lane.packets.iter().copied());
    let full = full_bar(counts);
    let several = scene.lanes.iter().any(|other| other.flows != lane.flows);
    let total: u64 = lane.packets.iter().sum();
    let name =
        if several { format!("{} on {}", flows(&lane.flows), lane.backend) } else { lane.backend.clone() };
    text(out, LEFT - 10.0, y + 18.0, "strong", "end", &name);
    text(out, LEFT - 10.0, y + 33.0, "soft small", "end", &format!("{total} packets"));
    rect(out, LEFT, y, RIGHT - LEFT, LANE, EMPTY);
    let end = lane.gone_from_ms.unwrap_or(scene.length_ms);
    if let Some(from) = lane.leaving_from_ms {
        rect(out, x(from), y, x(end) - x(from), LANE, LEAVING);
    }
    rect(out, x(end), y, RIGHT - x(end), LANE, GONE);
    let bars = lane.packets.iter().zip(&lane.packets_after_mark).enumerate();
    for (index, (count, after_mark)) in bars.filter(|(_, (count, _))| **count > 0) {
        let left = x(index as f64 * bin);
        let width = x((index + 1) as f64 * bin) - left - 0.8;
        let height = |count: u64| (LANE - 4.0) * (count as f64 / full).min(1.0);
        rect(out, left, y + LANE - height(*count), width, height(*count), GOOD);
        let fill = if lane.stays { STAYS } else { BAD };
        rect(out, left, y + LANE - height(*after_mark), width, height(*after_mark), fill);
    }
}

/// Packets of a full bar. On a busy machine the sender stalls and catches up: such bins are cut, or all others would be
/// low.
fn full_bar(counts: impl Iterator<Item = u64>) -> f64 {
    let mut counts: Vec<u64> = counts.filter(|count| *count > 0).collect();
    counts.sort_unstable();
    counts.get(counts.len() * 8 / 10).copied().unwrap_or(1) as f64
}

fn flows(flows: &str) -> &str {
    match flows {
        "old" => "old one",
        "new" => "new ones",
        other => other,
    }
}

fn draw_events(
    out: &mut String,
    events: &[&Event],
    x: &impl Fn(f64) -> f64,
    (rail, top, bottom): (f64, f64, f64),
) {
    let mut last = f64::MIN;
    for (number, event) in events.iter().enumerate() {
        let at = x(event.at_ms);
        let circle = at.max(last + APART);
        last = circle;
        let colour = colour(event.kind);
        let _infallible = writeln!(
            out,
            "<path d=\"M{circle:.1} {rail:.1}L{at:.1} {top:.1}V{bottom:.1}\" fill=\"none\" stroke=\"{colour}\" \
             stroke-width=\"1.2\" stroke-dasharray=\"4 2\"/><circle cx=\"{circle:.1}\" cy=\"{rail:.1}\" r=\"9\" fill=\"{colour}\"/>"
        );
        text(out, circle, rail + 4.0, "on", "middle", &(number + 1).to_string());
    }
}

const fn colour(kind: EventKind) -> &'static str {
    match kind {
        EventKind::Mark | EventKind::Kill => "#c53030",
        EventKind::Move => "#2f855a",
        EventKind::Act | EventKind::Mode | EventKind::End => "#2c5282",
    }
}

fn draw_axis(out: &mut String, length: f64, x: &impl Fn(f64) -> f64, y: f64) {
    let step = if length > 5000.0 { 1000.0 } else { 500.0 };
    let mut at = 0.0;
    while at <= length {
        rect(out, x(at), y, 1.0, 5.0, "#9aa5b1");
        text(out, x(at), y + 18.0, "soft small", "middle", &format!("{} s", at / 1000.0));
        at += step;
    }
}

fn list_events(out: &mut String, events: &[&Event], top: f64) -> f64 {
    let mut y = top + LINE;
    for (number, event) in events.iter().enumerate() {
        let colour = colour(event.kind);
        let _infallible = writeln!(
            out,
            "<circle cx=\"{}\" cy=\"{:.1}\" r=\"8\" fill=\"{colour}\"/>",
            MARGIN + 8.0,
            y - 4.0
        );
        text(out, MARGIN + 8.0, y, "on", "middle", &(number + 1).to_string());
        text(out, MARGIN + 24.0, y, "soft", "start", &format!("{:.2} s", event.at_ms / 1000.0));
        for line in wrap(&event.text, COLUMN - 12) {
            text(out, MARGIN + 70.0, y, "", "start", &line);
            y += LINE;
        }
        y += 4.0;
    }
    y
}

fn list_checks(out: &mut String, acts: &[Act], top: f64) -> f64 {
    let left = WIDTH / 2.0 + 20.0;
    let mut y = top + LINE;
    for act in acts {
        text(out, left, y, "strong", "start", &act.title);
        y += LINE;
        for Check { name, passed, seen } in &act.checks {
            let (class, sign) = if *passed { ("good strong", "✓") } else { ("bad strong", "✗") };
            text(out, left, y, class, "start", sign);
            for line in wrap(&format!("{name}: {seen}"), COLUMN) {
                text(out, left + 18.0, y, "", "start", &line);
                y += LINE;
            }
        }
        y += 6.0;
    }
    y
}

/// Breaks text at spaces into lines of at most `width` characters, or longer where a word is.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines
            .last_mut()
            .filter(|line| line.is_empty() || line.chars().count() + 1 + word.chars().count() <= width);
        match last {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) => {
                line.push(' ');
                line.push_str(word);
            }
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

fn rect(out: &mut String, x: f64, y: f64, width: f64, height: f64, fill: &str) {
    if width > 0.0 {
        let _infallible = writeln!(
            out,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{fill}\"/>"
        );
    }
}

fn text(out: &mut String, x: f64, y: f64, class: &str, anchor: &str, content: &str) {
    let content = content.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _infallible = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\" text-anchor=\"{anchor}\">{content}</text>"
    );
}

#[cfg(test)]
mod tests {
    use super::{full_bar, wrap};

    #[test]
    fn one_burst_does_not_make_the_other_bars_low() {
        let packets = [0, 100, 99, 100, 0, 900, 100, 100, 98];
        assert_eq!(full_bar(packets.into_iter()), 100.0);
    }

    #[test]
    fn lines_break_at_spaces_and_lose_no_word() {
        let lines = wrap("one two three four", 9);
        assert_eq!(lines, ["one two", "three", "four"]);
        assert_eq!(wrap("unbreakable word", 4), ["unbreakable", "word"]);
    }
}
