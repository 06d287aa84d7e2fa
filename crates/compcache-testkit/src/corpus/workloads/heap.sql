-- A database in memory such as an application keeps: people, their orders, notes, and indexes over them.
CREATE TABLE syllable (id INTEGER PRIMARY KEY, s TEXT);
INSERT INTO syllable (id, s) VALUES (0,'ka'),(1,'ber'),(2,'lin'),(3,'to'),(4,'mar'),(5,'sen'),(6,'vi'),(7,'dor'),(8,'an'),
  (9,'nel'),(10,'ro'),(11,'sta'),(12,'qui'),(13,'fel'),(14,'gu'),(15,'holm');
CREATE TABLE word (id INTEGER PRIMARY KEY, w TEXT);
WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 4095)
  INSERT INTO word SELECT i, (SELECT s FROM syllable WHERE id = i % 16) || (SELECT s FROM syllable WHERE id = i / 16 % 16)
    || (SELECT s FROM syllable WHERE id = i / 256) FROM n;
CREATE TABLE person (id INTEGER PRIMARY KEY, first TEXT, last TEXT, mail TEXT, city TEXT, born TEXT, balance REAL, active INTEGER);
WITH RECURSIVE n(i, r) AS (SELECT 1, 12345 UNION ALL SELECT i + 1, (r * 1103515245 + 12345) % 2147483648 FROM n WHERE i < 160000)
  INSERT INTO person SELECT i, (SELECT w FROM word WHERE id = r % 997), (SELECT w FROM word WHERE id = r % 4093),
    (SELECT w FROM word WHERE id = r % 4093) || i || '@example.org', (SELECT w FROM word WHERE id = r % 211),
    date(r % 1000000000, 'unixepoch'), (r % 10000019) / 100.0, r % 3 > 0 FROM n;
CREATE INDEX person_last ON person (last, first);
CREATE INDEX person_city ON person (city, born);
CREATE TABLE purchase (id INTEGER PRIMARY KEY, person INTEGER, item TEXT, price REAL, at TEXT, note TEXT);
WITH RECURSIVE n(i, r) AS (SELECT 1, 54321 UNION ALL SELECT i + 1, (r * 1103515245 + 12345) % 2147483648 FROM n WHERE i < 400000)
  INSERT INTO purchase SELECT i, r % 160000, (SELECT w FROM word WHERE id = r % 1499), (r % 99991) / 100.0,
    datetime(1600000000 + r % 100000000, 'unixepoch'),
    CASE WHEN r % 4 = 0 THEN (SELECT w FROM word WHERE id = r % 4091) || ' ' || (SELECT w FROM word WHERE id = r / 64 % 4096)
      || ' ordered by ' || (SELECT w FROM word WHERE id = r / 4096 % 4096) END FROM n;
CREATE INDEX purchase_person ON purchase (person);
CREATE INDEX purchase_item ON purchase (item, at);
DELETE FROM purchase WHERE id % 11 = 0;
.shell echo ready
