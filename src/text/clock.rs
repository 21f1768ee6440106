//! A date for templates that print one: seconds since 1970, as the caller gives them, in the proleptic Gregorian calendar, and
//! the directives of `strftime` that do not depend on a locale (names are English). Reads no clock.
#![forbid(unsafe_code)]

use std::fmt::Write;

/// Seconds since 1970-01-01 00:00:00 UTC and the offset of the local time from UTC.
pub(super) fn strftime(unix_seconds: i64, offset_seconds: i32, format: &str) -> Result<String, String> {
    let local = unix_seconds.saturating_add(i64::from(offset_seconds));
    let (days, second) = (local.div_euclid(86_400), local.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    if !(0..=9999).contains(&year) {
        return Err(format!("a time in the years 0 to 9999, found {unix_seconds} seconds since 1970"));
    }
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let (weekday, hour12) = ((days + 4).rem_euclid(7), (hour + 11) % 12 + 1);
    let year_day = days - days_of(year, 1, 1) + 1;
    let mut out = String::with_capacity(format.len() * 2);
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        // glibc's flag for "no padding".
        let bare = directive == Some('-');
        if bare {
            directive = chars.next();
        }
        let mut number = |value: i64, width: usize| {
            if bare { write!(out, "{value}") } else { write!(out, "{value:0width$}") }.expect("a String takes everything");
        };
        match directive {
            Some('Y') => number(year, 4),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month, 2),
            Some('d') => number(day, 2),
            Some('H') => number(hour, 2),
            Some('I') => number(hour12, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('j') => number(year_day, 3),
            Some('w') => number(weekday, 1),
            Some('u') => number((weekday + 6) % 7 + 1, 1),
            Some('s') => number(unix_seconds, 1),
            Some('e') if bare => number(day, 1),
            Some('e') => write!(out, "{day:2}").expect("a String takes everything"),
            Some('b' | 'h') => out.push_str(&MONTHS[month as usize - 1][..3]),
            Some('B') => out.push_str(MONTHS[month as usize - 1]),
            Some('a') => out.push_str(&WEEKDAYS[weekday as usize][..3]),
            Some('A') => out.push_str(WEEKDAYS[weekday as usize]),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('F') => out.push_str(&strftime(unix_seconds, offset_seconds, "%Y-%m-%d")?),
            Some('T') => out.push_str(&strftime(unix_seconds, offset_seconds, "%H:%M:%S")?),
            Some('R') => out.push_str(&strftime(unix_seconds, offset_seconds, "%H:%M")?),
            Some('D' | 'x') => out.push_str(&strftime(unix_seconds, offset_seconds, "%m/%d/%y")?),
            Some('X') => out.push_str(&strftime(unix_seconds, offset_seconds, "%H:%M:%S")?),
            Some('c') => out.push_str(&strftime(unix_seconds, offset_seconds, "%a %b %e %H:%M:%S %Y")?),
            Some('z') => {
                let sign = if offset_seconds < 0 { '-' } else { '+' };
                let minutes = offset_seconds.unsigned_abs() / 60;
                write!(out, "{sign}{:02}{:02}", minutes / 60, minutes % 60).expect("a String takes everything");
            }
            Some('n') => out.push('\n'),
            Some('t') => out.push('\t'),
            Some('%') => out.push('%'),
            other => {
                let found = other.map_or("the end".to_owned(), |c| format!("%{c}"));
                return Err(format!(
                    "a strftime directive among %Y %y %m %d %e %H %I %M %S %j %b %B %a %A %p %F %T, found {found}"
                ));
            }
        }
    }
    Ok(out)
}

const MONTHS: [&str; 12] =
    ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Days from 1970-01-01 to a date. The year is counted from March, so that the leap day is its last.
fn days_of(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * DAYS_OF_ERA + of_era * 365 + of_era / 4 - of_era / 100 + of_year - DAYS_TO_1970
}

/// The date so many days after 1970-01-01.
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + DAYS_TO_1970;
    let (era, day) = (days.div_euclid(DAYS_OF_ERA), days.rem_euclid(DAYS_OF_ERA));
    let of_era = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * of_era + of_era / 4 - of_era / 100);
    let march_month = (5 * of_year + 2) / 153;
    let month = (march_month + 2) % 12 + 1;
    let year = era * 400 + of_era + i64::from(month <= 2);
    (year, month, of_year - (153 * march_month + 2) / 5 + 1)
}

/// Days in 400 years.
const DAYS_OF_ERA: i64 = 146_097;
/// Days from 0000-03-01 to 1970-01-01.
const DAYS_TO_1970: i64 = 719_468;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_go_both_ways() {
        let (mut year, mut month, mut day) = (1600, 1, 1);
        for days in days_of(1600, 1, 1)..days_of(2401, 1, 1) {
            assert_eq!(civil(days), (year, month, day));
            assert_eq!(days_of(year, month, day), days);
            let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let len = [31, 28 + i64::from(leap), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31][month as usize - 1];
            (day, month, year) = match (day == len, month) {
                (false, _) => (day + 1, month, year),
                (true, 12) => (1, 1, year + 1),
                (true, _) => (1, month + 1, year),
            };
        }
    }

    #[test]
    fn directives() {
        let check = |at, offset, format, expected: &str| assert_eq!(strftime(at, offset, format).as_deref(), Ok(expected));
        check(1_721_952_000, 0, "%d %b %Y", "26 Jul 2024");
        check(1_721_952_000, 0, "%A, %B %-d, %Y %H:%M:%S %j", "Friday, July 26, 2024 00:00:00 208");
        check(1_721_952_000, -3600, "%F %T %z %p %I", "2024-07-25 23:00:00 -0100 PM 11");
        check(0, 0, "%a %e %y %m %%", "Thu  1 70 01 %");
        check(-1, 0, "%F %R", "1969-12-31 23:59");
        assert!(strftime(0, 0, "%Q").is_err());
        assert!(strftime(0, 0, "%").is_err());
        assert!(strftime(i64::MAX, i32::MAX, "%Y").is_err());
        assert!(strftime(i64::MIN, i32::MIN, "%Y").is_err());
    }
}
