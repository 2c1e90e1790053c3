#include "times.h"

namespace jaxrec::serving {
namespace {

constexpr int64_t kSecond = 1'000'000;
constexpr int64_t kHour = 3'600 * kSecond;
constexpr int64_t kDay = 24 * kHour;
constexpr int64_t kFirst = -719'162 * kDay;                // 1 January of the year 1
constexpr int64_t kLast = 2'932'896 * kDay + (kDay - 1);   // 31 December 9999

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

// Days since 1970 of a date, in years that begin in March (Howard Hinnant, "chrono-Compatible
// Low-Level Date Algorithms", days_from_civil).
int64_t days_of(int64_t year, int64_t month, int64_t day) {
  year -= month <= 2;
  const int64_t era = floor_div(year, 400);
  const int64_t of_era = year - era * 400;
  const int64_t of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
  return era * 146'097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719'468;
}

// Month of a day since 1970 (the same, civil_from_days).
int64_t month_of(int64_t day) {
  day += 719'468;
  const int64_t of_era = day - floor_div(day, 146'097) * 146'097;
  const int64_t year = (of_era - of_era / 1'460 + of_era / 36'524 - of_era / 146'096) / 365;
  const int64_t of_year = of_era - (365 * year + year / 4 - year / 100);
  const int64_t month = (5 * of_year + 2) / 153;
  return month < 10 ? month + 3 : month - 9;
}

int64_t days_in(int64_t year, int64_t month) {
  if (month == 2) return (year % 4 == 0 && year % 100 != 0) || year % 400 == 0 ? 29 : 28;
  return month == 4 || month == 6 || month == 9 || month == 11 ? 30 : 31;
}

// Reads a text from left to right. After the first failure all reads fail.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  bool is_good() const { return is_good_; }
  bool is_at_end() const { return text_.empty(); }

  // Reads a number of `digits` digits that is at least `least` and at most `most`.
  int64_t number(size_t digits, int64_t least, int64_t most) {
    int64_t value = 0;
    for (size_t i = 0; i < digits; ++i) {
      if (text_.empty() || text_[0] < '0' || text_[0] > '9') return fail();
      value = 10 * value + (text_[0] - '0');
      text_.remove_prefix(1);
    }
    return value < least || value > most ? fail() : value;
  }

  // Reads one of some characters and returns it; returns 0 where there is none.
  char one_of(std::string_view characters) {
    if (text_.empty() || characters.find(text_[0]) == characters.npos) return 0;
    const char found = text_[0];
    text_.remove_prefix(1);
    return found;
  }

  void expect(char character) {
    if (one_of(std::string_view(&character, 1)) == 0) fail();
  }

  // Reads the digits of a fraction of a second, at least one, as microseconds.
  int64_t fraction() {
    int64_t value = 0, unit = kSecond / 10;
    bool is_empty = true;
    for (char digit; (digit = one_of("0123456789")) != 0; unit /= 10) {
      value += unit * (digit - '0');
      is_empty = false;
    }
    return is_empty ? fail() : value;
  }

 private:
  int64_t fail() {
    is_good_ = false;
    return 0;
  }

  std::string_view text_;
  bool is_good_ = true;
};

// Reads "Z", "+02", "+0200" or "+02:00", or nothing; returns the offset from UTC.
int64_t read_zone(Reader& text) {
  const char sign = text.one_of("Z+-");
  if (sign == 0 || sign == 'Z') return 0;
  int64_t offset = text.number(2, 0, 23) * kHour;
  if (!text.is_at_end()) {
    text.one_of(":");
    offset += text.number(2, 0, 59) * 60 * kSecond;
  }
  return sign == '+' ? offset : -offset;
}

}  // namespace

std::optional<int64_t> parse_time(std::string_view content) {
  Reader text(content);
  const int64_t year = text.number(4, 0, 9999);
  text.expect('-');
  const int64_t month = text.number(2, 1, 12);
  text.expect('-');
  const int64_t day = text.number(2, 1, days_in(year, month));
  int64_t time = days_of(year, month, day) * kDay;
  if (text.one_of("T ") != 0) {
    time += text.number(2, 0, 23) * kHour;
    text.expect(':');
    time += text.number(2, 0, 59) * 60 * kSecond;
    if (text.one_of(":") != 0) {
      time += text.number(2, 0, 59) * kSecond;
      if (text.one_of(".") != 0) time += text.fraction();
    }
    time -= read_zone(text);
  }
  if (!text.is_good() || !text.is_at_end()) return std::nullopt;
  return time;
}

bool is_in_range(int64_t time) { return time >= kFirst && time <= kLast; }

int64_t part_of(int64_t time, TimePart part) {
  const int64_t day = floor_div(time, kDay);
  switch (part) {
    case TimePart::kHour: return (time - day * kDay) / kHour;
    case TimePart::kWeekday: return day + 3 - floor_div(day + 3, 7) * 7;
    default: return month_of(day);
  }
}

double days(int64_t time) { return static_cast<double>(time) / static_cast<double>(kDay); }

}  // namespace jaxrec::serving
